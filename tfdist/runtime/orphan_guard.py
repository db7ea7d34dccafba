"""A process that kills ranks whose launcher was killed by SIGKILL and could not do so.

It reads from its standard input which ranks run, `+pid` when one starts and `-pid` when one has
ended. The kernel closes that pipe when the launcher ends for any reason; then the remaining ranks are
killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
from typing import IO, cast


class OrphanGuard:
    """The launcher's end: a context in which the guard is notified of ranks."""

    def __enter__(self) -> "OrphanGuard":
        # A separate session, so that Ctrl-C at the terminal does not end the guard.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._pipe = cast(IO[bytes], self._process.stdin)
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.communicate()

    def watch(self, pid: int) -> None:
        """Adds a rank that has started as the leader of its process group."""
        self._send(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """Removes a rank that has ended: its process id may soon be reused."""
        self._send(f"-{pid}\n")

    def _send(self, line: str) -> None:
        # The job continues without its guard.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe.fileno(), line.encode())


def _serve() -> None:
    alive: set[int] = set()
    for line in sys.stdin:
        (alive.add if line[0] == "+" else alive.discard)(int(line[1:]))
    for pid in alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
