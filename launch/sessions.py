"""Commands that end, with all processes that they have started, when this process is terminated.

`subprocess.run` kills the command alone: the compilers that pip has started would keep running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import IO, Any

import psutil

from tfdist.runtime.orphan_guard import OrphanGuard


def run_in_session(
    command: Sequence[str],
    *,
    stdout: int | IO[bytes] = subprocess.PIPE,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess:
    """Runs a command as `subprocess.run` does, in a separate session that ends with this process.

    The command has no input. Other options are those of `subprocess.Popen`.

    Raises:
        subprocess.TimeoutExpired: It took longer than `timeout` seconds, and was killed.
    """
    with (
        OrphanGuard() as guard,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stdout, start_new_session=True, **options
        ) as process,
    ):
        guard.watch(process.pid)
        try:
            output, errors = process.communicate(timeout=timeout)
        finally:
            kill_session(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def kill_session(pid: int) -> None:
    """Kills a process and its children, including those in a separate process group."""
    for other in [pid, *psutil.pids()]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(other) == pid:
                os.kill(other, signal.SIGKILL)
