"""A process that ends ranks whose launcher was killed: SIGKILL leaves nobody else to do it.

It reads on its standard input which ranks run, `+pid` when one starts and `-pid` when one has
ended. The kernel closes that pipe when the launcher is gone in whatever way, and what is left then
is killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
from typing import IO, cast


class OrphanGuard:
    """The launcher's end: a context in which ranks are told to the guard."""

    def __enter__(self) -> "OrphanGuard":
        # A session of its own, which Ctrl-C at the terminal does not reach.
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
        """A rank has started, as leader of its process group."""
        self._tell(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """A rank has ended, and its process id may soon be another's."""
        self._tell(f"-{pid}\n")

    def _tell(self, line: str) -> None:
        # Without its guard the job goes on.
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
