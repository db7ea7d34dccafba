"""Commands that end, with all processes that they have started, when this process is terminated.

`subprocess.run` kills the command alone: the compilers that pip has started would keep running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any

import psutil

from tfdist.runtime.orphan_guard import OrphanGuard


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Has SIGTERM and SIGHUP raise `SystemExit` inside, as SIGINT raises `KeyboardInterrupt`.

    An ignored signal stays ignored, such as SIGHUP under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {
        number: signal.signal(number, end)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
