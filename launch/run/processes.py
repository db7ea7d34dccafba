"""The processes of a job's ranks, as used by the supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, cast

import psutil

from tfdist.launch.flags.command import UsageError
from tfdist.launch.sessions import kill_session


class RankProcess:
    """A rank in a separate session, so that its children end with it.

    Args:
        process: The leader of the session, whose output is a pipe.
    """

    def __init__(self, process: subprocess.Popen[bytes]):
        self._process = process
        self.output = cast(IO[bytes], process.stdout)
        os.set_blocking(self.output.fileno(), False)

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str]) -> RankProcess:
        """Start a rank on this machine, with additional environment variables."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
        return cls(start_session(command, environment, stdin=subprocess.DEVNULL))

    @property
    def pid(self) -> int:
        """Process id; for a remote rank that of the local ssh or srun."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """The exit code, or minus the number of the signal that killed it; None while it runs."""
        return self._process.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the rank and to the children in its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill the rank and all its children."""
        kill_session(self.pid)

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()

    def describe(self, code: int) -> str:
        """A description of the failure, which follows the rank's number."""
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        return f"failed first, with exit code {code}"

    def is_stopped(self) -> bool:
        """Whether the rank is stopped by SIGSTOP."""
        if self.code is not None:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False


def start_session(
    command: Sequence[str], environment: Mapping[str, str], stdin: int
) -> subprocess.Popen[bytes]:
    """Start a process as the leader of a session, with one pipe for stdout and stderr."""
    try:
        return subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise UsageError(f"{command[0]!r} cannot be run: {error.strerror}.") from error


def signal_name(number: int) -> str:
    """The name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
