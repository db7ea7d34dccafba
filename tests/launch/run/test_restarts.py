"""`tfdist-run`: jobs that are started again, and hosts that come and go."""

from __future__ import annotations

import sys
import time

import pytest

from tests.launch.jobs import TWO, by_rank, finish

FAILS_TWICE = 'n=$(cat {0} 2>/dev/null || echo 0); echo $((n+1)) > {0}; [ "$n" -ge 2 ] || exit 3'


def test_a_failed_job_is_started_again(jobs, tmp_path):
    script = by_rank(FAILS_TWICE.format(tmp_path / "starts"), "true")
    job = jobs.run("-np", "2", "--engine=tensorflow", "--max_restarts=2", "--", *script)
    assert job.returncode == 0, job.stderr
    assert "restart 1 of 2 in 1 s" in job.stderr
    assert "restart 2 of 2 in 2 s" in job.stderr
    assert (tmp_path / "starts").read_text().strip() == "3"


def test_too_many_failures_end_the_job(jobs, tmp_path):
    script = by_rank(FAILS_TWICE.format(tmp_path / "starts"), "true")
    job = jobs.run("-np", "2", "--engine=tensorflow", "--max_restarts=1", "--", *script)
    assert job.returncode == 3, job.stderr
    assert (tmp_path / "starts").read_text().strip() == "2"


def test_a_host_that_fails_again_is_left_out(jobs):
    """Both names are this machine's; with one rank there is no second one to fail."""
    job = jobs.run(
        *("-H=localhost:1,127.0.0.1:1", "-np=2", "--min_np=1", "--engine=tensorflow"),
        *("--max_restarts=5", "--restart_seconds=0", "--exclude_after=2", "--"),
        *by_rank("true", "exit 3"),
    )
    assert job.returncode == 0, job.stderr
    assert "the host 127.0.0.1 is excluded from now on: its ranks failed 2 times." in job.stderr
    assert job.stderr.count("restart") == 2


def test_the_hosts_say_how_many_ranks(jobs, tmp_path):
    (tmp_path / "hosts").write_text("localhost:1\n")
    # The only rank waits for company; then all end. A rank has a port of five digits.
    count = """$(echo "$TF_CONFIG" | grep -o ':[0-9]\\{5\\}' | wc -l)"""
    script = f"[ {count} -gt 1 ] || {{ echo > {tmp_path}/alone; sleep 60; }}"
    job = jobs.start(
        "-np=2",
        "--min_np=1",
        "--engine=tensorflow",
        f"--host_discovery_script=cat {tmp_path / 'hosts'}",
        "--",
        "sh",
        "-c",
        script,
    )
    end = time.monotonic() + 20
    while not (tmp_path / "alone").exists():
        assert job.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    (tmp_path / "hosts").write_text("localhost\n127.0.0.1:1\n")
    done = finish(job)
    assert done.returncode == 0, done.stderr
    assert "the hosts have changed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--min_np=1"], "--host_discovery_script or --exclude_after"),
        (["--exclude_after=2", "--max_restarts=1"], "requires several hosts"),
        (["--exclude_after=2", "-H=localhost:2"], "requires --max_restarts"),
        (["--host_discovery_script=false"], "--host_discovery_script=false"),
        (["--host_discovery_script=echo a:b"], "'a:b'"),
        (["--host_discovery_script=printf '\\377\\376'"], "must print UTF-8 text"),
        (["--host_discovery_script=echo far.invalid:2"], "far.invalid cannot be reached"),
        (["--host_discovery_script=true", "--min_np=3"], "--min_np=3"),
        (["--max_restarts=-1"], "--max_restarts=-1"),
    ],
)
def test_bad_words_about_failures_are_refused(jobs, arguments, said):
    job = jobs.run("-np", "2", "--engine=tensorflow", *arguments, "--", "true")
    assert job.returncode == 2
    (line,) = job.stderr.strip().splitlines()
    assert said in line


#: A failure of another kind leaves the others alone for this long.
PATIENT = """
from tfdist.launch.run import main as run
from tfdist.launch.run import supervisor
supervisor._GRACE_SECONDS = 50.0
run.run()
"""


def test_a_wrong_setting_ends_the_job_at_once(jobs):
    """What one rank says of a setting is true of the others: none gets time for a verdict."""
    program = [sys.executable, "-c", PATIENT]
    begun = time.monotonic()
    ranks = by_rank("exit 2", "exec sleep 60")
    finished = jobs.run("--max_restarts=3", *TWO, *ranks, program=program)
    assert finished.returncode == 2, finished.stderr
    assert "restart" not in finished.stderr
    assert time.monotonic() - begun < 40
