"""The owner of a lock: a process, distinguished from other processes with the same id."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from pathlib import Path

import psutil

from tfdist.runtime.channel import has_fields

#: A variable that is the same in all runs of a job that a launcher restarts.
JOB = "TFDIST_JOB"
#: How long a lock on a network file system outlives its owner, if nothing else shows its death.
STALE_SECONDS = 60.0
#: The tolerance of the start time of a process, in case the clock was set.
_CLOCK_SECONDS = 5.0
_KINDS: dict[str, type | tuple[type, ...]] = {"str": str, "int": int, "float": (int, float)}


@dataclasses.dataclass(frozen=True)
class Owner:
    """The owner of a lock.

    Attributes:
        host: The host's name.
        machine: Identifies the set of processes to which `pid` refers: the boot of the host, and the
            namespace of process ids.
        pid: The process id.
        started: When the process started, in seconds since the epoch.
        since: When it acquired the lock, in seconds since the epoch.
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
        now, started = time.time(), psutil.Process().create_time()
        job = os.environ.get(JOB, "")
        return cls(socket.gethostname(), _machine(), os.getpid(), started, now, job, now)

    @classmethod
    def parse(cls, content: bytes) -> Owner | None:
        """The owner in the content of a lock file; None if the content is malformed."""
        kinds = {field.name: _KINDS[str(field.type)] for field in dataclasses.fields(cls)}
        try:
            found = json.loads(content.decode())
            values = {name: found[name] for name in kinds}
        except (ValueError, RecursionError, KeyError, TypeError):
            return None
        return cls(**values) if has_fields(values, kinds) else None

    def content(self) -> bytes:
        """The content of a lock file."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode()

    def is_here(self) -> bool:
        """Whether the process is on this machine, which thus knows whether it lives."""
        return self.machine == _machine()

    def is_gone(self) -> bool:
        """Whether the process is known to have ended, or to have stopped renewing the lock."""
        if self.is_here():
            try:
                return abs(psutil.Process(self.pid).create_time() - self.started) > _CLOCK_SECONDS
            except psutil.NoSuchProcess:
                return True
            except psutil.Error:
                pass
        # A clock that is ahead counts like one that is behind.
        return abs(time.time() - self.renewed) > STALE_SECONDS

    def describe(self) -> str:
        """A description for messages."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(0.0, min(self.since, 4e9))))
        return f"process {self.pid} on host {self.host}, since {since}"


def _machine() -> str:
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)
