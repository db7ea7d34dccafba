"""`tfdist-run`: how a job ends, by a failure, by a signal or a rank that is stopped, and what it leaves."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from tests.launch.jobs import (
    HURRIED,
    PROGRAM,
    PYTHON,
    TIMEOUT,
    TWO,
    assert_said,
    by_rank,
    finish,
    wait_for,
)


def test_the_first_failure_decides_and_ends_the_others(jobs):
    begin = time.monotonic()
    finished = jobs.run(
        *TWO,
        *by_rank("trap 'echo told; exit 9' TERM; sleep 1000 & wait", "exit 3"),
        program=HURRIED,
    )
    assert_said(finished, 3, "rank 1 failed first, with exit code 3; the job was ended.")
    assert finished.stdout == "[0] told\n"
    assert time.monotonic() - begin < 20


def test_a_failure_that_tells_of_another_does_not_decide(jobs):
    finished = jobs.run(*TWO, *by_rank("exit 75", "sleep 0.3; exit 4"))
    assert_said(finished, 4, "rank 1 failed first, with exit code 4; the job was ended.")
    finished = jobs.run(*TWO, "sh", "-c", "exit 75")
    assert finished.returncode == 75
    assert "with exit code 75" in finished.stderr


def test_the_others_have_time_for_their_last_words(jobs):
    finished = jobs.run(*TWO, *by_rank("sleep 0.5; echo verdict; exit 75", "exit 3"))
    assert_said(finished, 3, "rank 1 failed first, with exit code 3; the job was ended.")
    assert finished.stdout == "[0] verdict\n"


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (40, "signal 40")])
def test_a_rank_that_a_signal_killed_is_named(jobs, number, name):
    finished = jobs.run(*TWO, *by_rank("sleep 0.2", f"kill -{number} $$"))
    assert_said(finished, 128 + number, f"rank 1 was killed by {name}; the job was ended.")


def test_a_rank_that_is_ended_with_the_job_is_not_blamed(jobs):
    """A rank that hung was killed here, and was then said to be the cause, with code 137."""
    finished = jobs.run(
        *TWO, *by_rank("exit 75", "trap '' TERM; while :; do sleep 0.1; done"), program=HURRIED
    )
    assert finished.returncode == 75
    assert "rank 0" in finished.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
    ids=lambda value: getattr(value, "name", None),
)
def test_signals_reach_all_ranks_and_end_the_job(jobs, number, code):
    name = number.name.removeprefix("SIG")
    job = jobs.start(
        *TWO, "sh", "-c", f"trap 'echo told; exit 9' {name}; echo up; sleep 1000 & wait"
    )
    said = wait_for(job, "[0] up", "[1] up")
    job.send_signal(number)
    finished = finish(job, said)
    assert_said(finished, code, f"ended by SIG{name}; no rank is running any more.")
    assert sorted(finished.stdout.splitlines()[-2:]) == ["[0] told", "[1] told"]


def test_ranks_that_ignore_signals_are_killed(jobs):
    job = jobs.start(
        *TWO,
        *["sh", "-c", "trap '' INT TERM; echo up; while :; do sleep 0.1; done"],
        program=HURRIED,
    )
    said = wait_for(job, "[0] up", "[1] up")
    job.send_signal(signal.SIGINT)
    assert_said(finish(job, said), 130, "ended by SIGINT; no rank is running any more.")


def test_a_job_under_nohup_outlives_its_terminal(jobs, tmp_path):
    go = tmp_path / "go"
    wait = ["sh", "-c", f"echo up; until [ -e {go} ]; do sleep 0.05; done"]
    job = jobs.start(*TWO, *wait, program=["nohup", *PROGRAM])
    said = wait_for(job, "[0] up", "[1] up")
    job.send_signal(signal.SIGHUP)
    go.touch()
    assert finish(job, said).returncode == 0


def test_ranks_end_when_nobody_reads_what_they_print(jobs):
    job = jobs.start(*TWO, "yes")
    wait_for(job, "[0] y")
    job.stdout.close()
    errors = job.stderr.read()
    assert job.wait(TIMEOUT) == 128 + signal.SIGPIPE
    assert errors == "tfdist-run: ended by SIGPIPE; no rank is running any more.\n"


# Ranks that are stopped.


def test_a_rank_that_is_stopped_for_too_long_ends_the_job(jobs):
    finished = jobs.run(
        "--watchdog_seconds=0.5",
        *TWO,
        *by_rank("trap 'echo told; exit 9' TERM; sleep 1000 & wait", "kill -STOP $$"),
        program=HURRIED,
    )
    assert_said(finished, 75, "rank 1 was frozen (SIGSTOP); the job was ended.")
    assert finished.stdout == "[0] told\n"


def test_a_stopped_rank_that_the_others_watchdog_found_is_named(jobs):
    finished = jobs.run(*TWO, *by_rank("sleep 0.5; exit 75", "kill -STOP $$"), program=HURRIED)
    assert_said(finished, 75, "rank 1 was frozen (SIGSTOP); the job was ended.")


@pytest.mark.parametrize("seconds", ["0", "30"])
def test_a_rank_may_be_stopped_for_a_while(jobs, tmp_path, seconds):
    wake = f"until [ -s {tmp_path}/pid ]; do sleep 0.05; done; sleep 1; kill -CONT $(cat {tmp_path}/pid)"
    finished = jobs.run(
        f"--watchdog_seconds={seconds}",
        *TWO,
        *by_rank(wake, f"echo $$ > {tmp_path}/pid; kill -STOP $$; echo back"),
    )
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "[1] back\n", "")


# What is left. The fixture finds every process that is alive after its test.


@pytest.mark.parametrize(
    ("last", "code"),
    [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)],
    ids=["success", "failure", "killed"],
)
def test_children_end_with_their_rank(jobs, last, code):
    finished = jobs.run(*TWO, "sh", "-c", f"sleep 1000 & {last}")
    assert finished.returncode == code


def test_children_in_a_process_group_of_their_own_end_too(jobs):
    child = (
        "import os; os.setpgid(0, 0); print('up', flush=True); os.execlp('sleep', 'sleep', '1000')"
    )
    start = f"import subprocess; subprocess.Popen([{sys.executable!r}, '-ISc', {child!r}]); "
    job = jobs.start(*TWO, *PYTHON, start + "import time; time.sleep(1000)")
    said = wait_for(job, "[0] up", "[1] up")
    job.terminate()
    assert finish(job, said).returncode == 143


def test_ranks_end_when_the_launcher_is_killed(jobs):
    job = jobs.start(*TWO, "sh", "-c", "sleep 1000 & echo up; wait")
    wait_for(job, "[0] up", "[1] up")
    job.kill()
    assert job.wait(TIMEOUT) == -signal.SIGKILL
