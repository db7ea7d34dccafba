"""`tfdist-train` as users start it: alone, under tfdist-run on both engines, under horovodrun."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

BIN = os.path.dirname(sys.executable)
TRAIN = [os.path.join(BIN, "tfdist-train"), "--epochs=2", "--model=mlp"]


def run(command, timeout=150):
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )


def last_word(job) -> tuple[float, str]:
    """Test accuracy in percent, and the ranks and strategy that reached it."""
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    lines = re.findall(r"Test accuracy ([\d.]+)%.* samples/s on (.*)\.", job.stdout)
    assert len(lines) == 1, job.stdout[-3000:]
    return float(lines[0][0]), lines[0][1]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return f"--data_dir={tmp_path_factory.mktemp('tfds')}"


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


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model=resnet"], "--model=resnet"),
        (["--batch_size=0"], "batch_size"),
        (["--nonsense=1"], "nonsense"),
        (["more"], "Received: more"),
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


def test_help_fits_the_screen():
    job = run([TRAIN[0], "--help"])
    assert job.returncode == 0
    lines = job.stdout.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80


def test_flags_from_a_file(tmp_path):
    (tmp_path / "flags").write_text("--model=transformer\n")
    job = run([TRAIN[0], f"--flagfile={tmp_path / 'flags'}"])
    assert job.returncode == 2 and "--model=transformer" in job.stderr
