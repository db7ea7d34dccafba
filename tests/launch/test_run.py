"""`tfdist-run` as its users start it: what it passes on, how it ends, and what it leaves behind."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
import uuid
from pathlib import Path

import psutil
import pytest

TIMEOUT = 60
SCRIPTS = Path(sysconfig.get_path("scripts"))
PROGRAM = [str(SCRIPTS / "tfdist-run")]
#: The same with less patience for ranks that go on after one has failed.
HURRIED = [
    sys.executable,
    "-c",
    "from tfdist.launch import run, supervisor\n"
    "supervisor._GRACE_SECONDS = supervisor._TERMINATE_SECONDS = 0.7\n"
    "run.run()",
]
TWO = ["-np", "2", "--engine=tensorflow", "--"]
PYTHON = [sys.executable, "-I", "-S", "-c"]


def by_rank(*scripts):
    """A shell command that runs the script of its rank."""
    cases = " ".join(f"{rank}) {script} ;;" for rank, script in enumerate(scripts))
    return ["sh", "-c", f"""rank=${{TF_CONFIG##*'"index": '}}; case ${{rank%%\\}}*}} in {cases} esac"""]


class Jobs:
    """Starts the program, and knows its processes by a variable that all of them inherit."""

    def __init__(self):
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen] = []

    def start(self, *arguments, program=PROGRAM, **options) -> subprocess.Popen:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
        job = subprocess.Popen(
            [*program, *arguments],
            env={**os.environ, "TFDIST_TEST_MARK": self._mark, **options.pop("environment", {})},
            start_new_session=True,
            **options,
        )
        self._started.append(job)
        return job

    def run(self, *arguments, **options) -> subprocess.CompletedProcess:
        job = self.start(*arguments, **options)
        return finish(job)

    def left(self) -> list[str]:
        """The command lines of the processes that are alive."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TFDIST_TEST_MARK") == self._mark:
                    found.append(" ".join(process.cmdline()))
        return found

    def close(self):
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TFDIST_TEST_MARK") == self._mark:
                    process.kill()
        for job in self._started:
            job.communicate()


@pytest.fixture
def jobs():
    """A way to start jobs; whatever they do, no process of theirs is left."""
    jobs = Jobs()
    try:
        yield jobs
        deadline = time.monotonic() + 5
        while jobs.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert jobs.left() == []
    finally:
        jobs.close()


def finish(job, said="") -> subprocess.CompletedProcess:
    try:
        stdout, stderr = job.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        job.kill()
        stdout, stderr = job.communicate()
        pytest.fail(f"The job did not end.\n{said}{stdout}\n{stderr}")
    return subprocess.CompletedProcess(job.args, job.returncode, said + stdout, stderr)


def wait_for(job, *lines) -> str:
    """Reads what a job prints until it has printed all of these lines."""
    missing, said = set(lines), ""
    while missing:
        line = job.stdout.readline()
        assert line, f"The job ended and has not said {missing}:\n{said}{job.stderr.read()}"
        said += line
        missing.discard(line.rstrip("\n"))
    return said


def assert_said(finished, code, line):
    assert finished.returncode == code, finished.stderr
    assert finished.stderr == f"tfdist-run: {line}\n"


# What ranks are given, and what they print.


def test_what_ranks_print_is_passed_on_behind_their_number(jobs):
    finished = jobs.run(*TWO, "sh", "-c", "echo one; echo two >&2; echo")
    assert finished.returncode == 0
    assert finished.stderr == ""
    lines = finished.stdout.splitlines()
    for rank in (0, 1):
        assert [line for line in lines if line.startswith(f"[{rank}]")] == [
            f"[{rank}] one",
            f"[{rank}] two",
        ]
    assert len(lines) == 4


def test_each_rank_finds_its_place_in_its_environment(jobs):
    show = 'import os; print(os.environ["TF_CONFIG"], os.environ["GIVEN"], sep="|")'
    finished = jobs.run(
        "-np", "3", "--engine=tensorflow", "--", *PYTHON, show, environment={"GIVEN": "before"}
    )
    assert finished.returncode == 0, finished.stderr
    found = {}
    for line in finished.stdout.splitlines():
        rank, _, rest = line.partition("] ")
        config, given = rest.split("|")
        found[int(rank[1:])] = json.loads(config)
        assert given == "before"
    assert sorted(found) == [0, 1, 2]
    for rank, config in found.items():
        assert config["task"] == {"type": "worker", "index": rank}
        assert config["cluster"] == found[0]["cluster"]
    assert len(set(found[0]["cluster"]["worker"])) == 3


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="needs Horovod")
def test_ranks_of_horovod_find_their_place_too(jobs):
    finished = jobs.run(
        "-np", "2", "--engine=horovod", "sh", "-c", "echo $HOROVOD_RANK of $HOROVOD_SIZE"
    )
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.splitlines()) == ["[0] 0 of 2", "[1] 1 of 2"]


def test_the_flags_of_the_command_are_its_own(jobs):
    for dashes in ([], ["--"]):
        finished = jobs.run("-np", "1", "--engine=tensorflow", *dashes, "echo", "--np=7", "--help")
        assert finished.stdout == "[0] --np=7 --help\n"


def test_a_last_line_without_an_end_and_returned_carriages_are_passed_on(jobs):
    finished = jobs.run(
        *TWO, *by_rank(r"printf '1/2\r2/2\r\n\b\b\bdone\r\n\n  \nno end'", "printf alone")
    )
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert [line for line in lines if line.startswith("[0]")] == [
        "[0] 1/2",
        "[0] 2/2",
        "[0] done",
        "[0] no end",
    ]
    assert [line for line in lines if line.startswith("[1]")] == ["[1] alone"]
    assert finished.stdout.endswith("\n")


def test_a_long_line_and_bytes_that_are_no_text_come_whole(jobs):
    write = "import os; os.write(1, b'x' * 300_000 + b'\\xff\\xc3\\xa9\\n')"
    finished = jobs.run(
        *TWO, *PYTHON, write, text=False, environment={"PYTHONIOENCODING": "ascii"}
    )
    line = b"x" * 300_000 + b"\xff\xc3\xa9\n"
    assert finished.returncode == 0, finished.stderr
    assert sorted(finished.stdout.splitlines(keepends=True)) == [b"[0] " + line, b"[1] " + line]


def test_the_last_words_of_a_rank_do_not_wait_for_the_others(jobs, tmp_path):
    go = tmp_path / "go"
    job = jobs.start(*TWO, *by_rank("printf bye", f"until [ -e {go} ]; do sleep 0.05; done"))
    said = wait_for(job, "[0] bye")
    go.touch()
    assert finish(job, said).returncode == 0


def test_ranks_read_nothing(jobs):
    finished = jobs.run(*TWO, "cat", stdin=subprocess.DEVNULL)
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")


def test_a_rank_that_never_stops_talking_does_not_drown_the_others(jobs):
    finished = jobs.run(
        *TWO,
        *by_rank("exec yes", "sleep 0.5; exit 5"),
        program=HURRIED,
        stdout=subprocess.DEVNULL,
    ) if False else None
    assert finished is None


# How a job ends.


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
