"""A rank that raises, dies or freezes ends the whole job in time, named, and leaves nothing behind."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import skip_without

PROGRAM = Path(__file__).with_name("program.py")
WATCHDOG_SECONDS = 10.0
ENGINES = ["horovod", "tensorflow"]
FAULTS = ["exception", "SIGTERM", "SIGKILL", "SIGSTOP"]
#: "stage" is in the middle of a step of a pipeline, one of whose stages is the victim's; "compiled" is
#: "mid-epoch" with steps that XLA compiles.
PHASES = ["start-up", "first-step", "mid-epoch", "save", "stage", "compiled"]
RANKS = {"chief": 0, "other": 1}

#: Run by `make test`: a rank that dies, and one that hangs. The rest is slow.
QUICK = {
    ("horovod", "SIGKILL", "stage", "chief"),
    ("tensorflow", "SIGSTOP", "mid-epoch", "other"),
}


def cases():
    for case in itertools.product(ENGINES, FAULTS, PHASES, RANKS):
        marks = () if case in QUICK else (pytest.mark.slow,)
        yield pytest.param(*case, marks=marks, id="-".join(case))


@pytest.mark.parametrize(("engine", "fault", "phase", "who"), list(cases()))
def test_job_ends_and_names_the_rank(tmp_path, engine, fault, phase, who):
    skip_without(engine)
    name, value = "TFDIST_TEST_MARK", f"{tmp_path.name}-{os.getpid()}"
    note = tmp_path / "note"
    job = run_program(engine, fault, phase, who, note, {name: value})
    ended = time.time()
    story = job.stdout[-6000:] + job.stderr[-2000:]
    assert note.exists(), story
    assert job.returncode not in (0, 2), story
    assert ended - float(note.read_text()) < WATCHDOG_SECONDS + 10, story
    assert "came to the end" not in job.stdout, story
    assert f"rank {RANKS[who]}" in job.stderr.strip().splitlines()[-1], story
    assert not orphans(name, value), story


@pytest.mark.parametrize("phase", ["mid-epoch", pytest.param("stage", marks=pytest.mark.slow)])
def test_a_loss_that_is_no_number_ends_the_job(tmp_path, phase):
    skip_without("horovod")
    # In a pipeline the last stage has the loss.
    job = run_program("horovod", "non-finite", phase, "other", tmp_path / "note", {})
    story = job.stdout[-6000:] + job.stderr[-2000:]
    assert job.returncode not in (0, 2), story
    said = "The loss of rank 1 was not finite for 3 training steps in a row, up to step 6"
    assert said in job.stdout + job.stderr, story
    assert "rank 1" in job.stderr.strip().splitlines()[-1], story


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
def test_ranks_may_end_seconds_apart(tmp_path, engine):
    skip_without(engine)
    job = run_program(engine, "lateness", "end", "other", tmp_path / "note", {})
    story = job.stdout[-6000:] + job.stderr[-2000:]
    assert job.returncode == 0, story
    assert job.stdout.count("came to the end") == 2, story
    assert "watchdog" not in job.stdout + job.stderr, story


@pytest.mark.slow
@pytest.mark.parametrize("who", ["chief", pytest.param("other", marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ["horovod", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_a_rank_is_named_whose_end_waits_for_a_thread(tmp_path, engine, who):
    skip_without(engine)
    begin = time.time()
    job = run_program(engine, "held", "mid-epoch", who, tmp_path / "note", {})
    story = job.stdout[-6000:] + job.stderr[-2000:]
    assert job.returncode not in (0, 2), story
    assert time.time() - begin < 50, story
    assert f"Rank {RANKS[who]} failed: RuntimeError: as planned" in job.stdout + job.stderr, story


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
def test_the_rank_is_named_whose_exception_the_others_raise_again(tmp_path, engine):
    """Though it ends after them: what the chief raises while it writes files is raised on all ranks."""
    skip_without(engine)
    job = run_program(engine, "held", "save", "chief", tmp_path / "note", {})
    story = job.stdout[-6000:] + job.stderr[-2000:]
    assert job.returncode not in (0, 2), story
    assert "Rank 0 failed: RuntimeError: as planned" in job.stdout + job.stderr, story
    assert "Rank 1 failed" not in job.stdout + job.stderr, story


@pytest.mark.slow
@pytest.mark.parametrize("who", ["chief", pytest.param("other", marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ["tensorflow", pytest.param("horovod", marks=pytest.mark.slow)])
def test_a_rank_that_leaves_others_waiting_is_named(tmp_path, engine, who):
    skip_without(engine)
    job = run_program(engine, "leaving", "mid-epoch", who, tmp_path / "note", {})
    story = job.stdout[-6000:] + job.stderr[-2000:]
    assert job.returncode not in (0, 2), story
    other = 1 - RANKS[who]
    assert f"Rank {RANKS[who]} ended while rank {other} waits" in job.stdout + job.stderr, story


def run_program(engine, fault, phase, who, note, more) -> subprocess.CompletedProcess:
    command = [
        os.path.join(os.path.dirname(sys.executable), "tfdist-run"),
        "-np=2",
        f"--engine={engine}",
        f"--watchdog_seconds={WATCHDOG_SECONDS}",
        "--",
        sys.executable,
        str(PROGRAM),
        fault,
        phase,
        str(RANKS[who]),
        str(note),
    ]
    environment = {**os.environ, **more, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=150, check=False
    )


def orphans(name: str, value: str) -> list[int]:
    """Processes that carry the job's mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value:
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found
