"""The time of a recovery: until a restarted training is back at the step that it had reached."""

from __future__ import annotations

import contextlib
import json
import os
import time

import psutil

from tfdist.runtime.directories import is_address
from tfdist.runtime.recovery import FAILED_AT

#: Written about once a second: the step that a training has reached.
_PROGRESS = "progress.json"


class Recovery:
    """Records the step that a training has reached, and reports how long a restarted one took to get there.

    Steps are only recorded on file systems: a write every second to an object store is too slow.

    Args:
        directory: The folder of the checkpoints, or an address.
    """

    def __init__(self, directory: str):
        self._path = None if is_address(directory) else os.path.join(directory, _PROGRESS)
        self._written: int | None = None
        self._until: int | None = None
        self._start = self._load = self._loaded = 0.0

    def read(self) -> int:
        """The recorded step, also after the last checkpoint; 0 if it is unknown."""
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
                    found = json.loads(file.read(1000))
                step = found.get("step") if isinstance(found, dict) else None
                if isinstance(step, int) and not isinstance(step, bool):
                    return step
        return 0

    def write(self, step: int) -> None:
        """Records the step. Errors are ignored, because the next save reports them."""
        if self._path is None or step == self._written:
            return
        self._written = step
        # Not by TensorStore, which waits for the disk: the step need not survive a crash of the host.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            with open(os.open(f"{self._path}.new", flags, 0o666), "w") as file:
                file.write(f'{{"step": {step}}}')
            os.replace(f"{self._path}.new", self._path)

    def restored(self, step: int, load: float) -> None:
        """A checkpoint was restored: the recovery lasts until the recorded step, at least for a step.

        Args:
            step: The step of the checkpoint.
            load: The seconds in which it was restored.
        """
        self._start, self._load = time.time() - _down_since() - load, load
        self._loaded = time.monotonic()
        self._until = max(self.read(), step + 1)

    def report(self, step: int) -> str | None:
        """What to say at a step, when the recovery is over; None before, and later."""
        if self._until is None or step < self._until:
            return None
        self._until = None
        replay = time.monotonic() - self._loaded
        return (
            f"Recovered in {self._start + self._load + replay:.1f} s: {self._start:.1f} start, "
            f"{self._load:.1f} load, {replay:.1f} replay."
        )


def _down_since() -> float:
    """When the previous run failed, if a launcher passes it; otherwise when this process began.

    Returns:
        Seconds since the epoch, in the past.
    """
    now, begun = time.time(), psutil.Process().create_time()
    with contextlib.suppress(KeyError, ValueError):
        begun = float(os.environ[FAILED_AT])
    # The clocks of hosts differ, and one may have been set.
    return min(now, begun)
