"""Who holds a lock: a process, told apart from all others that had its number."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time

import psutil

#: A variable that is the same in all runs of a job that a launcher starts again.
JOB = "TFDIST_JOB"
#: How long a lock over a network outlives its holder, where nothing else tells that it is dead.
STALE_SECONDS = 60.0
#: By how much the start of one process may seem to differ, where the clock was set.
_CLOCK_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Owner:
    """Who holds a lock.

    Attributes:
        host: The host's name.
        machine: What tells the host's processes from those of others: its boot, and the namespace of
            process ids.
        pid: The process.
        started: When it started, in seconds after the boot of the system's clock.
        since: When it took the lock, in seconds of the wall clock.
        job: The launcher's job; "" without a launcher.
        renewed: When it last renewed the lock.
    """

    host: str
    machine: str
    pid: int
    started: float
    since: float
    job: str
    renewed: float

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        now = time.time()
        return cls(
            socket.gethostname(),
            _machine(),
            os.getpid(),
            psutil.Process().create_time(),
            now,
            os.environ.get(JOB, ""),
            now,
        )

    @classmethod
    def parse(cls, content: bytes) -> Owner | None:
        """What a lock file says; None where that is nothing."""
        try:
            found = json.loads(content.decode())
            kinds = {field.name: str(field.type) for field in dataclasses.fields(cls)}
            values = {name: found[name] for name in kinds}
        except (ValueError, RecursionError, KeyError, TypeError):
            return None
        right: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}
        if not all(isinstance(values[name], right[kind]) for name, kind in kinds.items()):
            return None
        return cls(**values)

    def content(self) -> bytes:
        """As a lock file holds it."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    def is_gone(self) -> bool:
        """Whether the process is known to have ended, or to have stopped renewing."""
        if self.machine == _machine():
            try:
                return abs(psutil.Process(self.pid).create_time() - self.started) > _CLOCK_SECONDS
            except psutil.NoSuchProcess:
                return True
            except psutil.Error:
                pass
        # A clock that runs ahead makes a lock no older than one that runs behind.
        return abs(time.time() - self.renewed) > STALE_SECONDS

    def describe(self) -> str:
        """For messages."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(0.0, min(self.since, 4e9))))
        return f"process {self.pid} on host {self.host}, since {since}"


def _machine() -> str:
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with contextlib.suppress(OSError):
            if path.endswith("pid"):
                parts.append(os.readlink(path))
            else:
                with open(path, encoding="ascii") as file:
                    parts.append(file.read().strip())
    return " ".join(parts)
