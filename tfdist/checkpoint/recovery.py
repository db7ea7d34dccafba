"""What a training says of its checkpoints: what they take, and how long the way back took."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import time

import keras

from tfdist.checkpoint.chunks import item_bytes
from tfdist.checkpoint.entries import arrays_of, entries_of
from tfdist.checkpoint.errors import StorageError
from tfdist.checkpoint.storage import Storage
from tfdist.collectives import Group
from tfdist.utils.quantities import as_bytes

_logger = logging.getLogger("tfdist")

#: Says how far a training came, about once a second.
_PROGRESS = "progress.json"
#: Of sizes in messages.
_DIGITS = 3


class Progress:
    """How far the training in a folder came, also beyond its last checkpoint.

    Kept in folders of file systems alone: an object store would take its time every second.

    Args:
        directory: The folder, or an address.
    """

    def __init__(self, directory: str):
        self._storage = Storage(directory)
        self._written: int | None = None

    def read(self) -> int:
        """The step; 0 where it is not known."""
        if not self._storage.is_local:
            return 0
        with contextlib.suppress(StorageError):
            found = self._storage.read_json(_PROGRESS)
            step = found.get("step") if isinstance(found, dict) else None
            if isinstance(step, int) and not isinstance(step, bool):
                return step
        return 0

    def write(self, step: int) -> None:
        """Notes the step; what keeps it from that is told when a checkpoint is saved."""
        if not self._storage.is_local or step == self._written:
            return
        self._written = step
        path = os.path.join(self._storage.path, _PROGRESS)
        # It need not survive the machine: TensorStore would wait for the disk.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            handle = os.open(f"{path}.new", flags, 0o666)
            with open(handle, "w") as file:
                file.write(f'{{"step": {step}}}')
            os.replace(f"{path}.new", path)


class Recovery:
    """The way back to where a training stood: the start of its processes, the load, and the replay.

    Args:
        since: When the run before failed, by the wall clock.
        until: The step that it had come to.
    """

    def __init__(self, since: float, until: int):
        self._until = until
        self._start = time.time() - since
        self._began = time.monotonic()
        self._loaded = self._began

    def note_loaded(self, step: int) -> None:
        """Called when the state of a checkpoint was read.

        Args:
            step: Its step. Not before the one after is training under way again.
        """
        self._loaded = time.monotonic()
        self._until = max(self._until, step + 1)

    def is_over(self, step: int) -> bool:
        """Whether a training that has made so many steps is back where it was."""
        return step >= self._until

    def words(self) -> str:
        """How long it took, now that it is over."""
        load, replay = self._loaded - self._began, time.monotonic() - self._loaded
        total = self._start + load + replay
        return (
            f"Recovered in {total:.1f} s: {self._start:.1f} start, {load:.1f} load, "
            f"{replay:.1f} replay."
        )


def tell(text: str, verbose: int) -> None:
    """Prints a line where `fit` prints something; else it is logged at level INFO.

    Args:
        text: The line.
        verbose: That of `fit`; 1 for a progress bar, which may stand in the line.
    """
    if verbose:
        print(f"\n{text}" if verbose == 1 else text, flush=True)
    else:
        _logger.info("%s", text)


def room_words(
    directory: str, model: keras.Model, world: Group, keep_last: int | None
) -> str | None:
    """What the checkpoints of a model take, beside the free space; all ranks call this.

    Args:
        directory: Where they are kept.
        model: The model, with a built optimizer.
        world: All ranks.
        keep_last: How many are kept; None for all.

    Returns:
        The line, with a warning in it where the room is too small; None on others than the chief.
    """
    arrays = arrays_of(entries_of(model), world)
    if world.rank:
        return None
    size = sum(math.prod(shape) * item_bytes(dtype) for shape, dtype in arrays.values())
    said = f"A checkpoint takes {as_bytes(size, _DIGITS)}"
    needed = size
    if keep_last is not None:
        # An old one goes when the new one was read back.
        needed = size * (keep_last + 1)
        said += f", the {keep_last} that are kept and one that is being written {as_bytes(needed, _DIGITS)}"
    else:
        said += ", and all are kept"
    if not Storage(directory).is_local:
        return f"{said}."
    free = shutil.disk_usage(directory).free
    said += f"; {as_bytes(free, _DIGITS)} are free in {directory}."
    return said if needed < free else f"{said} That is too little."
