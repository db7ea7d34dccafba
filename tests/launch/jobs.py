"""Jobs of `tfdist-run` as its users start them, and what is found of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

__all__ = [
    "HURRIED",
    "PROGRAM",
    "PYTHON",
    "SCRIPTS",
    "TIMEOUT",
    "TWO",
    "Jobs",
    "assert_said",
    "by_rank",
    "finish",
    "heed_signals",
    "wait_for",
]

TIMEOUT = 60
SCRIPTS = Path(sysconfig.get_path("scripts"))
PROGRAM = [str(SCRIPTS / "tfdist-run")]
#: The same with less patience for ranks that go on after one has failed.
HURRIED = [
    sys.executable,
    "-c",
    "from tfdist.launch.run import main as run, supervisor\n"
    "supervisor._GRACE_SECONDS = supervisor._TERMINATE_SECONDS = 0.7\n"
    "run.run()",
]
TWO = ["-np", "2", "--engine=tensorflow", "--"]
PYTHON = [sys.executable, "-I", "-S", "-c"]


def by_rank(*scripts):
    """A shell command that runs the script of its rank."""
    cases = " ".join(f"{rank}) {script} ;;" for rank, script in enumerate(scripts))
    return [
        "sh",
        "-c",
        f"""rank=${{TF_CONFIG##*'"index": '}}; case ${{rank%%\\}}*}} in {cases} esac""",
    ]


def heed_signals() -> None:
    """Tests may run under nohup, whose programs ignore a SIGHUP, or in a shell's background."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class Jobs:
    """Starts the program, and knows its processes by a variable that all of them inherit."""

    def __init__(self):
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen] = []

    def start(self, *arguments, program=PROGRAM, **options) -> subprocess.Popen:
        defaults: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
            "preexec_fn": heed_signals,
        }
        options = defaults | options
        job = subprocess.Popen(
            [*program, *arguments],
            env={**os.environ, "TFDIST_TEST_MARK": self._mark, **options.pop("environment", {})},
            **options,
        )
        self._started.append(job)
        return job

    def run(self, *arguments, **options) -> subprocess.CompletedProcess:
        return finish(self.start(*arguments, **options))

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


def finish(job, said="") -> subprocess.CompletedProcess:
    """Waits for the end; `said` is what was read of the output before."""
    try:
        stdout, stderr = job.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        job.kill()
        stdout, stderr = job.communicate()
        pytest.fail(f"The job did not end.\n{said}{stdout}\n{stderr}")
    return subprocess.CompletedProcess(
        job.args, job.returncode, said + stdout if said else stdout, stderr
    )


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
