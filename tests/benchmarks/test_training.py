"""`python -m benchmarks.training`: its data, what it writes, its refusals, and that its jobs train."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

from benchmarks import findings
from benchmarks.comparisons import COMPARISONS, SIZES, Job
from benchmarks.environments import ENVIRONMENTS, MADE
from benchmarks.findings import Finding, Side
from benchmarks.job_variables import outside, variables
from benchmarks.jobs import JobError, RunningJob
from benchmarks.measuring import write_between
from benchmarks.model_flops import gemm_peak, step_flops
from benchmarks.training import compare
from tests.conftest import skip_without
from tfdist import models
from tfdist.addons import recommenders
from tfdist.addons.monitoring.monitor.flops import count_flops

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".peers"
BENCH = (sys.executable, "-m", "benchmarks.training")
GPT = SIZES["tiny"]["gpt"]


def side(title, seconds, peak):
    return Side(title, "thing 1.0", seconds, seconds, 100 << 20, peak << 20, 4.0, 3.0)


FOUND = [
    Finding(
        "gpt-ddp",
        side("tfdist, data parallel", [0.1, 0.2, 0.3], 500),
        side("PyTorch DDP", [0.2, 0.2, 0.2], 400),
        1.0,
        1234,
        "2 cores of a machine",
        "2026-01-02",
    ),
    Finding(
        "gpt-fsdp",
        side("tfdist, ZeRO-3", [0.3, 0.3, 0.3], 300),
        side("PyTorch FSDP2", [0.2, 0.2, 0.2], 400),
        1.0,
        1234,
        "2 cores of a machine",
        "2026-01-03",
    ),
]


def bench(*arguments, **options):
    return subprocess.run(
        [*BENCH, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        **{"cwd": ROOT, **options},
    )


def made(environment):
    """Skips a test whose peer is not there."""
    if environment and not (PEERS / environment / MADE).exists():
        pytest.skip("`make peers` makes the environments of others.")


def test_comparisons_are_of_what_there_is():
    for name, comparison in COMPARISONS.items():
        assert comparison.name == name and comparison.model in SIZES["full"]
        assert comparison.ours.environment is None and 0 < comparison.limit <= 1
        for job in (comparison.ours, comparison.theirs):
            assert job.environment is None or job.environment in ENVIRONMENTS
            assert (ROOT / "benchmarks" / "peers" / f"{job.program}.py").exists()
            # Nobody has more of the machine than the other.
            assert job.ranks * job.threads == 2


def test_ratios_are_those_of_rounds():
    faster, slower = FOUND
    assert faster.ratios == pytest.approx([0.5, 1.0, 1.5]) and faster.ratio == pytest.approx(1.0)
    assert not faster.is_over and slower.is_over
    assert faster.ours.growth == 400 << 20
    assert "0.500" in faster.row() and "1.500" in faster.row()


def test_shares_of_peak_are_in_the_tables():
    # A step of 0.2 s at 10 GFLOP/s has 2 GFLOP at most.
    measured = dataclasses.replace(FOUND[0], flops=0.5e9, gemm_peak=10e9)
    assert measured.share_of_peak(measured.ours) == pytest.approx(0.25)
    slower = dataclasses.replace(measured.theirs, seconds=[0.4] * 3)
    assert measured.share_of_peak(slower) == pytest.approx(0.125)
    for unknown in ({"flops": None}, {"gemm_peak": None}):
        assert dataclasses.replace(measured, **unknown).share_of_peak(slower) is None
    times, _, ran = findings.table([dataclasses.replace(measured, theirs=slower), FOUND[1]]).split(
        "\n\n"
    )
    rows = [[cell.strip() for cell in row.split("|")[-3:-1]] for row in times.splitlines()]
    assert rows[0] == ["this, of peak", "other, of peak"] and rows[2:] == [["25%", "12%"], ["", ""]]
    assert "10 GFLOP/s" in ran
    # What was measured before there were shares has a table without them.
    assert "peak" not in findings.table(FOUND)


@pytest.mark.parametrize("size", list(SIZES))
def test_flops_of_a_step_are_those_of_the_formulas(size):
    sizes = SIZES[size]
    gpt, convnet = sizes["gpt"], sizes["convnet"]
    width, tokens = gpt["width"], gpt["tokens"]
    products = gpt["layers"] * 12 * width**2 + gpt["vocabulary"] * width
    scores = gpt["layers"] * 2 * tokens * width
    assert step_flops(COMPARISONS["gpt-ddp"], gpt) == 6 * gpt["batch"] * tokens * (
        products + scores
    )
    # Two of eight experts for each token, and the router.
    more = gpt["layers"] * (8 * width**2 + 8 * width)
    assert step_flops(COMPARISONS["gpt-experts"], gpt) == 6 * gpt["batch"] * tokens * (
        products + scores + more
    )
    pixels = convnet["side"] ** 2
    convolutions = 9 * (3 * 32 + 32 * 32 + (32 * 64 + 64 * 64) / 4) * pixels
    dense = 64 * pixels / 16 * 128 + 128 * convnet["classes"]
    assert step_flops(COMPARISONS["convnet-ddp"], convnet) == 6 * convnet["batch"] * (
        convolutions + dense
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "convnet", "dlrm"])
def test_flops_of_a_step_are_those_of_the_graph(model):
    sizes = SIZES["tiny"][model]
    found = built(model, sizes)
    specs = {each.name: tf.TensorSpec([1, *each.shape[1:]], each.dtype) for each in found.inputs}
    if model == "gpt":
        specs = {"tokens": tf.TensorSpec([1, sizes["tokens"]], tf.int32)}
    forward = tf.function(lambda inputs: found(inputs)).get_concrete_function(
        specs if len(specs) > 1 else next(iter(specs.values()))
    )
    counted = count_flops(forward.graph)
    assert counted.is_whole
    name = f"{model}-one-process"
    assert 3 * sizes["batch"] * counted.model == step_flops(COMPARISONS[name], sizes)


def built(model, sizes):
    """The model of a comparison."""
    if model == "gpt":
        return models.gpt(
            sizes["vocabulary"],
            num_layers=sizes["layers"],
            width=sizes["width"],
            num_heads=sizes["heads"],
            max_length=sizes["tokens"],
        )
    if model == "convnet":
        return models.convnet((sizes["side"], sizes["side"], 3), sizes["classes"])
    return recommenders.dlrm(
        sizes["dense"],
        [sizes["vocabulary"]] * sizes["tables"],
        embedding_dim=sizes["width"],
        bottom_widths=(sizes["hidden"],),
        top_widths=(2 * sizes["hidden"], sizes["hidden"]),
    )


@pytest.mark.slow
def test_the_peak_of_products_is_measured():
    # A core does a billion operations a second at least, and a hundred thousand billion at most.
    assert 1e9 < gemm_peak(1) < 1e14


def test_processes_on_jax_find_each_other_and_have_their_threads(monkeypatch):
    monkeypatch.setenv("NPROC", "64")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "1")
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "64")
    kept = set(outside())
    assert not {"NPROC", "XLA_FLAGS", "JAX_PLATFORMS", "TF_NUM_INTRAOP_THREADS"} & kept
    assert "TF_ENABLE_ONEDNN_OPTS" in kept
    for name, processes, devices in (
        ("gpt-jax", 1, 1),
        ("convnet-jax-devices", 1, 2),
        ("gpt-jax-processes", 2, 1),
        ("gpt-jax-tensor", 1, 2),
    ):
        job = COMPARISONS[name].theirs
        assert job.variables["XLA_FLAGS"].endswith(f"device_count={devices}")
        with variables(job) as ranks:
            assert len(ranks) == processes
            assert {rank["NPROC"] for rank in ranks} == {str(2 // processes)}
            assert len({rank["KERAS_DISTRIBUTION_JOB_ADDRESSES"] for rank in ranks}) == 1
            ids = [rank["KERAS_DISTRIBUTION_PROCESS_ID"] for rank in ranks]
            assert ids == [str(number) for number in range(processes)]


def test_json_holds_the_findings(tmp_path):
    path = tmp_path / "found.json"
    assert findings.read(path) == {}
    findings.write(path, FOUND)
    assert findings.read(path) == {finding.name: finding for finding in FOUND}
    line = json.loads(path.read_text())["findings"][1]
    assert line["ratio"] == pytest.approx(1.5) and line["spread"] == pytest.approx([1.5, 1.5])
    for other in ("[]", "{", '{"findings": [{"name": "x"}]}'):
        path.write_text(other)
        with pytest.raises(ValueError, match="is not a file of findings"):
            findings.read(path)


def test_the_table_marks_what_is_above_its_limit():
    times, used, ran = findings.table(FOUND).split("\n\n")
    assert "| 200.0 | 200.0 | 1.00 | 0.50 to 1.50 | 1.00 |" in " ".join(times.split())
    assert "**1.50**" in times and "**1.00**" not in times
    assert "| **500** | 400 | 400 | 300 | 200.0 | 200.0 |" in " ".join(used.split())
    assert "**300**" not in used
    assert ran == "Measured 2026-01-02 to 2026-01-03, on 2 cores of a machine; thing 1.0."


def test_the_table_goes_between_the_marks(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- here -->\nold\n<!-- end -->\nafter\n")
    for text in ("new", "newer"):
        write_between(path, "here", text)
        assert path.read_text() == f"before\n<!-- here -->\n{text}\n<!-- end -->\nafter\n"
    with pytest.raises(ValueError, match="A place is missing"):
        write_between(path, "there", "new")


@pytest.mark.parametrize(
    "mark",
    [
        "benchmarks.training",
        "benchmarks.training, large",
    ],
)
def test_the_document_has_the_marks(tmp_path, mark):
    page = tmp_path / "performance.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text())
    write_between(page, mark, findings.table(FOUND))
    assert "PyTorch FSDP2" in page.read_text()


def test_a_picture_is_drawn(tmp_path):
    findings.picture(tmp_path / "picture.svg", FOUND)
    assert "<svg" in (tmp_path / "picture.svg").read_text()[:1000]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only=gpt-dpp"], "--only"),
        (["--rounds=0"], "--rounds"),
        (["--sizes=huge"], "--sizes"),
        (["--allocator=/nowhere.so"], "--allocator=/nowhere.so does not exist"),
        (["--nonsense"], "nonsense"),
        (["--only=gpt-ddp", "--peers=/nowhere"], "make peers"),
        (["--only=gpt-one-process", "--document=/nowhere.md"], "--document"),
        (["--only=gpt-one-process", "--json=/dev/null"], "--json"),
    ],
)
def test_refusals(arguments, said):
    finished = bench(*arguments)
    assert finished.returncode == 2, finished.stderr
    assert said in finished.stderr and finished.stdout == ""
    assert len(finished.stderr.splitlines()) == 1


def test_help_fits_a_screen():
    finished = bench("--help")
    assert finished.returncode == 0 and len(finished.stdout.splitlines()) < 25
    assert "benchmarks.training" in finished.stdout


def pids_of(running):
    return [process.pid for process in running._processes]


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


ALONE = dataclasses.replace(COMPARISONS["gpt-one-process"].theirs, threads=1)


def test_a_rank_that_dies_is_one_line():
    with RunningJob(ALONE, "gpt", GPT, PEERS) as running:
        (pid,) = pids_of(running)
        assert running.parameters == 28_032
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(JobError, match="one process: rank 0 was killed by SIGKILL"):
            running.block(1)
    assert is_gone(pid)


def test_a_rank_that_cannot_start_is_one_line():
    job = dataclasses.replace(ALONE, options={"engine": "steam"})
    with pytest.raises(JobError, match=r"rank 0 .*: KeyError: 'steam'"):
        RunningJob(job, "gpt", GPT, PEERS).__enter__()


def test_a_rank_that_hangs_is_one_line(tmp_path):
    # What runs is the interpreter of the environment: here one that says nothing.
    python = tmp_path / "slow" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nsleep 600\n")
    python.chmod(0o755)
    (tmp_path / "slow" / MADE).touch()
    running = RunningJob(Job("Sloth", "none", "slow", "torch"), "gpt", GPT, tmp_path, 1.0)
    seen = []
    start = running._start
    running._start = lambda: (start(), seen.extend(pids_of(running)))
    with pytest.raises(JobError, match=r"Ranks \[0, 1\] of Sloth did not respond within 1 s"):
        running.__enter__()
    assert len(seen) == 2 and all(is_gone(pid) for pid in seen)


@pytest.fixture(scope="module")
def allocator(tmp_path_factory):
    """A library to preload, and the file in which processes that do so say what they were told."""
    folder = tmp_path_factory.mktemp("allocator")
    source, library, said = folder / "here.c", folder / "libhere.so", folder / "said"
    source.write_text(
        f"""
        #include <stdio.h>
        #include <stdlib.h>
        __attribute__((constructor)) static void here(void) {{
          FILE* file = fopen("{said}", "a");
          const char* told = getenv("TF_ONEDNN_USE_SYSTEM_ALLOCATOR");
          if (file == NULL) abort();
          fprintf(file, "%s\\n", told ? told : "nothing");
          fclose(file);
        }}
        """
    )
    subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", library], check=True, timeout=60)
    return library, said


@pytest.mark.slow
def test_tfdist_against_itself(tmp_path, allocator):
    skip_without("horovod")
    library, said = allocator
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- benchmarks.training, tiny, allocator -->\nNot measured yet.\n<!-- end -->\n"
    )
    flags = ["--sizes=tiny", "--rounds=2", "--steps=2", "--timeout=120"]
    finished = bench(
        "training",
        "--only=gpt-one-process,convnet-one-process",
        *flags,
        f"--allocator={library}",
        f"--json={tmp_path}/found.json",
        f"--document={page}",
        f"--picture={tmp_path}/picture.png",
    )
    # With models as small as these the ratio may be anything.
    assert finished.returncode in (0, 1) and finished.stderr == "", finished.stderr
    found = findings.read(tmp_path / "found.json")
    assert list(found) == ["gpt-one-process", "convnet-one-process"]
    for finding in found.values():
        assert len(finding.ratios) == 2 and min(finding.ratios) > 0
        assert finding.ours.last_loss < finding.ours.first_loss
        assert 0 < finding.ours.growth < finding.ours.peak
        assert min(finding.ours.processor) > 0
        assert 0 < finding.share_of_peak(finding.ours) < 1
    assert "tfdist, one process" in page.read_text() and "Not measured" not in page.read_text()
    # Two ranks and one process, for each of two models.
    assert said.read_text().splitlines().count("1") >= 6
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in COMPARISONS if COMPARISONS[name].theirs.environment]
)
def test_a_peer_trains_the_same_model(name):
    comparison = COMPARISONS[name]
    made(comparison.theirs.environment)
    skip_without("horovod")
    found = compare(comparison, sizes="tiny", peers=PEERS, rounds=1, steps=2, timeout=120.0)
    # `compare` has seen that they are as large, and learn.
    assert found.parameters > 20_000 and len(found.ratios) == 1
    if comparison.model == "gpt":
        assert found.ours.first_loss == pytest.approx(found.theirs.first_loss, rel=0.02)
