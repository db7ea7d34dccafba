"""`tfdist-train` as users start it: alone, under tfdist-run on both engines, under horovodrun."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess

import pytest

from tests.launch.processes import BIN, run

TRAIN = [os.path.join(BIN, "tfdist-train"), "--epochs=2", "--model=mlp"]


def last_word(job) -> tuple[float, str]:
    """Test accuracy in percent, and the ranks and strategy that reached it."""
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    lines = re.findall(r"Test accuracy ([\d.]+)%.* samples/s on (.*)\.", job.stdout)
    assert len(lines) == 1, job.stdout[-3000:]
    return float(lines[0][0]), lines[0][1]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return f"--data_dir={tmp_path_factory.mktemp('tfds')}"


@pytest.mark.slow
def test_ranks_reach_what_one_process_reaches(data_dir):
    alone = last_word(run([*TRAIN, data_dir]))
    assert alone[1] == "1 rank(s) of LocalStrategy"
    runner = [os.path.join(BIN, "tfdist-run"), "-np=2"]
    found = {"tensorflow": "MultiWorkerStrategy"}
    if importlib.util.find_spec("horovod"):
        found["horovod"] = "HorovodStrategy"
    for engine, strategy in found.items():
        job = run([*runner, f"--engine={engine}", "--", *TRAIN, data_dir])
        accuracy, who = last_word(job)
        assert who == f"2 rank(s) of {strategy}"
        assert accuracy == pytest.approx(alone[0], abs=0.6)
        assert "[1] Epoch" not in job.stdout


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed")
def test_under_horovodrun(data_dir):
    job = run([os.path.join(BIN, "horovodrun"), "-np", "2", *TRAIN, data_dir])
    assert last_word(job)[1] == "2 rank(s) of HorovodStrategy"


@pytest.mark.slow
def test_the_recommender_comes_near_the_best_there_is():
    runner = [os.path.join(BIN, "tfdist-run"), "-np=2", "--"]
    job = run([*runner, TRAIN[0], "--model=dlrm", "--threads=1"])
    assert last_word(job)[1].startswith("2 rank(s) of")
    found = re.search(r"and loss ([\d.]+), of at best ([\d.]+), on", job.stdout)
    assert found is not None and "table_0" in job.stdout, job.stdout[-3000:]
    assert float(found[2]) < float(found[1]) < 0.6, found[0]  # A coin has 0.693.


@pytest.mark.slow
def test_gpt_on_two_ranks_reaches_what_one_process_reaches(tmp_path):
    text = b"The quick brown fox jumps over the lazy dog. " * 400
    (tmp_path / "text").write_bytes(text)
    gpt = [TRAIN[0], "--model=gpt", "--epochs=2", f"--dataset=text:{tmp_path / 'text'}"]
    gpt += ["--layers=1", "--width=32", "--heads=2", "--seq_length=32", "--threads=1"]
    gpt += ["--batch_size=8", "--learning_rate=0.01"]
    runner = [os.path.join(BIN, "tfdist-run"), "-np=2", "--"]
    sample = "--sample=40"
    jobs = {
        "1 rank(s) of Local": run([*gpt, sample]),
        "tensor 2": run([*runner, *gpt, "--tensor=2", "--sequence_parallel", sample]),
        "context 2": run([*runner, *gpt, "--context=2", sample]),
        "pipeline 2": run([*runner, *gpt, "--pipeline=2", "--schedule=zero-bubble"]),
    }
    losses = {}
    for where, job in jobs.items():
        assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
        *_, before, last = job.stdout.strip().splitlines()
        found = re.fullmatch(
            r".*Validation loss ([\d.]+), perplexity ([\d.]+), .* tokens/s on (.*)\.", last
        )
        assert found and where in found[3], last
        losses[where] = float(found[1])
        assert float(found[2]) == pytest.approx(math.exp(losses[where]), rel=1e-3)
        if where != "pipeline 2":
            assert any(word in before for word in ("quick", "brown", "jumps", "lazy")), before
        assert "[1] Epoch" not in job.stdout and job.stdout.count("Validation loss") == 1
    assert re.search("stage +rank +layers", jobs["pipeline 2"].stdout)
    alone = losses["1 rank(s) of Local"]
    # Far below the text's entropy a byte when bytes are taken one by one.
    assert alone < 0.5
    assert all(loss == pytest.approx(alone, abs=0.02) for loss in losses.values()), losses


@pytest.mark.slow
def test_stages_by_hand_small_buckets_and_optimal_recompute_change_no_result(tmp_path):
    (tmp_path / "text").write_bytes(b"The quick brown fox jumps over the lazy dog. " * 200)
    gpt = [TRAIN[0], "--model=gpt", "--epochs=1", f"--dataset=text:{tmp_path / 'text'}"]
    gpt += ["--layers=2", "--width=32", "--heads=2", "--seq_length=32", "--threads=1"]
    gpt += ["--batch_size=8"]
    runner = [os.path.join(BIN, "tfdist-run"), "-np=2", "--"]
    jobs = [
        run(gpt),
        run([*runner, *gpt, "--pipeline=2", "--cut=2,4"]),
        run([*runner, *gpt, "--bucket_mib=1", "--recompute=optimal"]),
    ]
    losses = []
    for job in jobs:
        assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
        losses += map(float, re.findall(r"Validation loss ([\d.]+)", job.stdout))
    assert losses == pytest.approx([losses[0]] * 3, abs=2e-3)
    assert re.search(r"embedding_dropout \(2\) .*\n.* \(4\) ", jobs[1].stdout), jobs[1].stdout[
        -3000:
    ]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--speculative"]])
def test_backup_ranks(data_dir, more):
    runner = [os.path.join(BIN, "tfdist-run"), "--engine=tensorflow", "--ps=1", "-np=3", "--"]
    job = run([*runner, *TRAIN, data_dir, "--threads=1", "--backup_ranks=1", *more])
    assert last_word(job)[1] == "3 worker(s) of ParameterServerStrategy"
    assert job.stdout.count("steps_of_worker_0") > 0, job.stdout[-3000:]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model=resnet"], "--model=resnet"),
        (["--batch_size=0"], "batch_size"),
        (["--nonsense=1"], "nonsense"),
        (["more"], "Received: more"),
        (["--heads=2"], "--heads requires --model=gpt"),
        (["--tensor=2"], "--tensor=2"),
        (["--dataset=pydoc"], "--model=gpt"),
        (["--model=gpt", "--dataset=digits"], "--dataset=digits"),
        (["--model=gpt", "--width=130"], "--width=130 --heads=4"),
        (["--model=gpt", "--tensor=3"], "--heads=4 --tensor=3"),
        (["--model=gpt", "--tensor=0"], "tensor"),
        (["--context=2"], "--context is not supported for --model=mlp"),
        (["--model=gpt", "--context_attention=all_gather"], "requires a context axis"),
        (["--model=gpt", "--context=2", "--dropout=0.1"], "--context=2 --dropout=0.1"),
        (["--model=gpt", "--context=2", "--pipeline=2", "--seq_length=6"], "--seq_length=6"),
        (
            ["--model=gpt", "--context=3", "--context_attention=ulysses"],
            "--heads=4 --tensor=1 --context=3",
        ),
        (["--model=gpt", "--schedule=gpipe"], "--schedule requires a pipeline"),
        (["--cut=1,2"], "--cut requires a pipeline"),
        (["--model=gpt", "--pipeline=2", "--cut=1,x"], "--cut must be even, cyclic, or"),
        (["--backup_ranks=1"], "--backup_ranks requires --strategy=parameter_server"),
        (
            ["--strategy=parameter_server", "--speculative"],
            "--speculative requires --backup_ranks",
        ),
        (["--strategy=tpu", "--bucket_mib=2"], "--bucket_mib is not supported on a TPU"),
        (["--bucket_mib=0"], "bucket_mib"),
        (["--model=gpt", "--pipeline=2", "--sample=9"], "--sample=9 --pipeline=2"),
        (["--zero_stage=4"], "zero_stage"),
        (["--workdir=/tmp/x", "--save_every=soon"], "--save_every=soon"),
        (["--keep=3"], "--workdir"),
        (
            ["--model=gpt", "--pipeline=2", "--schedule=interleaved", "--num_microbatches=3"],
            "--num_microbatches=3",
        ),
        (
            ["--model=gpt", "--tensor=2", "--sequence_parallel", "--seq_length=33"],
            "--seq_length=33 --tensor=2",
        ),
    ],
)
def test_a_bad_flag_is_one_line(flags, words):
    job = run([*TRAIN, *flags])
    assert job.returncode == 2
    assert job.stderr.count("\n") == 1 and words in job.stderr, job.stderr


def test_a_data_set_that_does_not_exist_is_one_line(tmp_path):
    job = run([*TRAIN, "--dataset=digitz", f"--data_dir={tmp_path}"])
    assert job.returncode == 2
    assert "digitz" in job.stderr.strip().splitlines()[-1], job.stderr


@pytest.mark.slow
def test_text_that_cannot_be_learned_from_is_one_line(tmp_path):
    # Enough to train on, not enough to validate with.
    (tmp_path / "short").write_bytes(b"Too short." * 100)
    job = run([*TRAIN, "--model=gpt", f"--dataset=text:{tmp_path / 'short'}"])
    assert job.returncode == 2
    assert "validation part" in job.stderr.strip().splitlines()[-1], job.stderr


@pytest.mark.slow
def test_a_mesh_that_the_ranks_do_not_fill_is_one_line():
    job = run([*TRAIN, "--model=gpt", "--tensor=2"])
    assert job.returncode == 2
    last = job.stderr.strip().splitlines()[-1]
    assert "--tensor=2" in last and "1 was started" in last, job.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num_microbatches=4", "--batch_size=6"], "--batch_size=6"),
        pytest.param(
            ["--layers=1", "--schedule=interleaved", "--chunks=9"],
            "--pipeline=2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_pipeline_that_cannot_be_is_one_line(flags, words):
    command = [TRAIN[0], "--model=gpt", "--pipeline=2", "--threads=1", *flags]
    job = run([os.path.join(BIN, "tfdist-run"), "-np=2", "--", *command])
    assert job.returncode == 2
    said = [line for line in job.stdout.splitlines() if "tfdist-train: " in line]
    assert said and all(words in line for line in said), job.stdout


@pytest.mark.slow
def test_a_training_goes_on_in_its_workdir(tmp_path, data_dir):
    train = [TRAIN[0], "--model=mlp", "--epochs=60", data_dir, "--threads=1"]
    whole = last_word(run([*train, f"--workdir={tmp_path / 'whole'}"]))
    parts = [*train, f"--workdir={tmp_path / 'parts'}", "--save_every=5"]
    with subprocess.Popen(
        parts, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        for line in job.stdout:
            if line.startswith("Epoch 3"):
                job.terminate()
                break
        rest = job.stdout.read()
        assert job.wait(60) == 76, rest
    again = run(parts)
    assert last_word(again) == whole
    assert "Epoch 1/" not in again.stdout and "Epoch 60/" in again.stdout
    # Once it is done it says so again.
    done = run(parts)
    assert last_word(done) == whole and "Epoch" not in done.stdout
    refused = run([*parts, "--model=convnet"])
    assert refused.returncode == 2
    assert "is not a checkpoint of this model" in refused.stderr.strip().splitlines()[-1], (
        refused.stderr
    )


@pytest.mark.parametrize(
    ("workdir", "words"),
    [
        ("/dev/null/x", "--workdir=/dev/null/x cannot be written: /dev/null is not a folder."),
        # A folder in which not even root can make one.
        pytest.param("/proc/x", "/proc/x: cannot write", marks=pytest.mark.slow),
    ],
)
def test_a_workdir_that_cannot_be_written_is_one_line(data_dir, workdir, words):
    refused = run([TRAIN[0], "--model=mlp", data_dir, f"--workdir={workdir}"])
    assert refused.returncode == 2
    last = refused.stderr.strip().splitlines()[-1]
    assert words in last, refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("elastic", "steps"), [("keep", 20), pytest.param("scale", 40, marks=pytest.mark.slow)]
)
def test_fewer_ranks_than_were_meant(tmp_path, data_dir, elastic, steps):
    """One rank of the two that a job is meant for keeps the global batch, or its own share of it."""
    command = [TRAIN[0], "--model=mlp", "--epochs=1", data_dir, "--threads=1", "--batch_size=72"]
    command += [f"--elastic={elastic}", f"--workdir={tmp_path}", "--lr_scaling=linear"]
    runner = [os.path.join(BIN, "tfdist-run"), "-np=2", "--min_np=1"]
    job = run([*runner, "--host_discovery_script=echo localhost:1", "--", *command])
    assert job.returncode == 0, job.stdout + job.stderr
    saved = [int(folder.name.split("-")[1]) for folder in tmp_path.glob("step-*")]
    assert max(saved) == steps


def test_help_fits_the_screen_and_names_all_flags():
    short, full = (run([TRAIN[0], flag]) for flag in ("--help", "--helpfull"))
    assert short.returncode == full.returncode == 0
    lines = short.stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, [*lines, *full.stdout.splitlines()])) <= 80
    names = re.findall(r"^(--\w+)", full.stdout, re.MULTILINE)
    assert {"--model", "--heads", "--strategy"} < set(names)
    assert set(names) <= set(re.findall(r"--\w+", short.stdout))


def test_flags_from_a_file(tmp_path):
    (tmp_path / "flags").write_text("--model=transformer\n")
    job = run([TRAIN[0], f"--flagfile={tmp_path / 'flags'}"])
    assert job.returncode == 2 and "--model=transformer" in job.stderr


@pytest.mark.slow
def test_a_damaged_data_file_is_one_line(tmp_path):
    train = [TRAIN[0], "--model=mlp", "--epochs=1", f"--data_dir={tmp_path / 'data'}"]
    assert run(train).returncode == 0
    (records,) = (tmp_path / "data").rglob("*train.tfrecord*")
    content = bytearray(records.read_bytes())
    content[len(content) // 2] ^= 0xFF
    records.write_bytes(content)
    job = run(train)
    assert job.returncode == 2
    last = job.stderr.strip().splitlines()[-1]
    assert "--dataset=digits could not be read, a file is corrupt: corrupted record at" in last, (
        job.stderr
    )
    assert "Traceback" not in job.stderr
