"""Where one rank raises, or a callback is missing on it, nobody waits for ever.

The story: `try: model.save(path) except OSError` went on at the chief, while the others waited for a file
that nobody wrote; a TensorBoard of somebody's own that drew pictures ran on the chief alone, whose
`predict` then waited for the others. Ten minutes later a verdict named a line inside of tfdist.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bugs import writer_programs
from tests.bugs.comparing import compare
from tests.conftest import on_ranks, skip_without, slow_but
from tests.strategies.programs import in_one_process
from tfdist import Mesh

PROGRAM = Path(__file__).with_name("hang_program.py")
#: That of the program. A job that ends well before has not ended by it.
WATCHDOG_SECONDS = 60.0

#: What the verdict says of the ranks that part.
CASES = {
    "predict_in_callback": (
        "wait for each other",
        "Rank 0 called `fit` (or `evaluate`, `predict`)",
    ),
    "evaluate_in_callback": (
        "wait for each other",
        "Rank 0 called `fit` (or `evaluate`, `predict`)",
    ),
    "save_in_callback": ("wait for each other", "Rank 0 called `save` (or `save_weights`"),
    "gather_on_chief": ("wait for each other", "in gather_on_chief; rank 1 did not reach it"),
    "metric_read_on_chief": (
        "wait for each other",
        "in metric_read_on_chief; rank 1 did not reach it",
    ),
    "metric_read_on_chief_then_end": (
        "Rank 1 ended while rank 0 waits",
        "in metric_read_on_chief_then_end",
    ),
    "fit_on_chief_then_end": ("Rank 1 ended while rank 0 waits", "in fit_on_chief_then_end"),
    "fit_on_one_save_on_other": ("wait for each other", "in fit_on_one_save_on_other"),
    "input_raises_on_rank_1": ("wait for each other", "in input_raises_on_rank_1"),
    "callback_raises_caught": ("wait for each other", "in callback_raises_caught"),
    "callback_raises_caught_then_end": ("Rank 1 ended while rank 0 waits", "in callback_raises"),
    "csv_that_cannot_be_written": ("wait for each other", "in csv_that_cannot_be_written"),
    "callback_raises": ("Rank 1 failed: OSError: as planned", "in callback_raises"),
    "fit_on_one_evaluate_on_other": (
        "Received: fit on rank 0; evaluate on rank 1",
        "in fit_on_one",
    ),
}
ENGINES = ["horovod", "tensorflow"]


@pytest.mark.parametrize(
    ("engine", "case"),
    slow_but([("horovod", "gather_on_chief")], [(e, c) for e in ENGINES for c in CASES]),
)
def test_the_job_ends_and_names_the_lines(tmp_path, engine, case):
    job, seconds = run_program(tmp_path / "note", engine, case)
    print(f"{engine} {case}: {seconds:.1f} s")
    said = job.stdout + job.stderr
    story = said[-6000:]
    assert job.returncode in (1, 75), story
    assert seconds < WATCHDOG_SECONDS / 2, story
    for words in CASES[case]:
        assert words in said, story
    assert "has not ended for" not in said, story
    verdict = "".join(line for line in said.splitlines() if "called at" in line)
    assert "tfdist_receive" not in verdict and "<string>" not in verdict, story
    assert "wait for each other" not in said or verdict.count(PROGRAM.name) >= 2, story


@pytest.mark.slow
def test_a_step_that_fails_on_all_ranks_at_other_times_is_no_deadlock(tmp_path):
    job, _ = run_program(tmp_path / "note", "horovod", "both_fail_seconds_apart")
    story = (job.stdout + job.stderr)[-6000:]
    assert job.returncode == 0, story
    assert "rank 0 failed" in job.stdout and "rank 1 failed" in job.stdout, story
    assert job.stdout.count("came to the end") == 2, story


def run_program(note: Path, engine: str, case: str) -> tuple[subprocess.CompletedProcess, float]:
    """The job, and the seconds from where the ranks part to its end."""
    skip_without(engine)
    command = [
        os.path.join(os.path.dirname(sys.executable), "tfdist-run"),
        "-np=2",
        f"--engine={engine}",
        "--",
        sys.executable,
        str(PROGRAM),
        case,
        str(note),
    ]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    job = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    return job, time.time() - float(note.read_text())


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("horovod", 3)])
def test_what_the_chief_raises_all_raise(pool, one_process, tmp_path):
    expected, after = one_process.run(in_one_process, writer_programs.failing, tmp_path / "one")[0]
    kinds = [each[0] for each in expected]
    assert kinds[0] == "FileNotFoundError" or kinds[0] == "NotADirectoryError", expected
    assert "nothing" not in kinds and kinds[-2:] == ["Named", "Unwieldy"], expected
    results = pool.run(fail_on_mesh, tmp_path / "many")
    for rank, (raised, _) in enumerate(results):
        told = expected if rank == 0 else [*expected[:-1], ("RuntimeError", False, "Unwieldy: ")]
        for (kind, known, words, *_), (want, right, text, *_), (*_, notes) in zip(
            raised, told, raised, strict=True
        ):
            assert (kind, known) == (want, right), raised
            assert text in words or "file/more" in text, raised
            assert rank == 0 or "Rank 0 raised this in" in notes[0], raised
    for rank, (_, end) in enumerate(results):
        compare(f"rank {rank}", {**end, "written": ""}, {**after, "written": ""}, 1e-5)
    assert results[0][1]["written"] == after["written"]


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("horovod", 3)])
@pytest.mark.parametrize(
    ("kind", "zero_stage"),
    slow_but(
        [("Pictures", 0), ("histograms", 3)],
        [
            (kind, stage)
            for kind in ("all", "Table", "Pictures", "Remote", "Bar", "Backup", "histograms")
            for stage in (0, 3)
        ],
    ),
)
def test_writers_run_on_all_ranks_and_write_once(pool, one_process, tmp_path, kind, zero_stage):
    args = (kind, tmp_path / "one")
    expected, files, posts = one_process.run(in_one_process, writer_programs.fit, *args)[0]
    results = pool.run(fit_on_mesh, kind, tmp_path / "many", zero_stage)
    for rank, (end, written, posted) in enumerate(results):
        compare(f"rank {rank}", end, expected, 1e-5)
        if rank:
            assert (written, posted) == ([], 0), rank
    assert results[0][2] == posts
    # Event files bear the time and the process.
    assert [name.split(".")[0] for name in results[0][1]] == [name.split(".")[0] for name in files]


def fit_on_mesh(kind: str, root: Path, zero_stage: int):
    from tfdist.testing import strategy

    return writer_programs.fit(strategy(Mesh(), zero_stage=zero_stage), kind, root)


def fail_on_mesh(root: Path):
    from tfdist.testing import strategy

    return writer_programs.failing(strategy(), root)
