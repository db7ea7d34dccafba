"""Reports on checkpoints during training: the space that they take, and the time of a recovery."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import time

import keras

from tfdist.checkpoint.chunks import item_bytes
from tfdist.checkpoint.entries import entries_of, gather_arrays
from tfdist.checkpoint.errors import StorageError
from tfdist.checkpoint.storage import Storage
from tfdist.collectives import Group
from tfdist.runtime.directories import is_address
from tfdist.utils.quantities import as_bytes

_logger = logging.getLogger("tfdist")

#: Written about once a second: the step that a training has reached.
_PROGRESS = "progress.json"
#: Significant digits of sizes in messages.
_DIGITS = 3


class Progress:
    """The step that the training in a folder has reached, also after its last checkpoint.

    Only recorded on file systems: a write every second to an object store is too slow.

    Args:
        directory: The folder, or an address.
    """

    def __init__(self, directory: str):
        self._directory = None if is_address(directory) else directory
        self._written: int | None = None

    def read(self) -> int:
        """The step; 0 if it is unknown."""
        if self._directory is not None:
            with contextlib.suppress(StorageError):
                found = Storage(self._directory).read_json(_PROGRESS)
                step = found.get("step") if isinstance(found, dict) else None
                if isinstance(step, int) and not isinstance(step, bool):
                    return step
        return 0

    def write(self, step: int) -> None:
        """Records the step. Errors are ignored, because the next save reports them."""
        if self._directory is None or step == self._written:
            return
        self._written = step
        path = os.path.join(self._directory, _PROGRESS)
        # Not by TensorStore, which waits for the disk: the step need not survive a crash of the host.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            with open(os.open(f"{path}.new", flags, 0o666), "w") as file:
                file.write(f'{{"step": {step}}}')
            os.replace(f"{path}.new", path)


class Recovery:
    """The time until a training is back at its last step: start of the processes, load and replay.

    Created when a checkpoint was restored.

    Args:
        since: The time of the previous run's failure, in seconds since the epoch.
        load: The seconds in which the checkpoint was restored.
        until: The step at which the recovery is over.
    """

    def __init__(self, since: float, load: float, until: int):
        self._start, self._load, self._until = time.time() - since - load, load, until
        self._loaded = time.monotonic()

    def is_over(self, step: int) -> bool:
        """Whether a training at this step has reached the step before the failure."""
        return step >= self._until

    def words(self) -> str:
        """The report, at the end of the recovery."""
        replay = time.monotonic() - self._loaded
        return (
            f"Recovered in {self._start + self._load + replay:.1f} s: {self._start:.1f} start, "
            f"{self._load:.1f} load, {replay:.1f} replay."
        )


def report(text: str, verbose: int) -> None:
    """Prints a line if `fit` prints; otherwise logs it at level INFO.

    Args:
        text: The line.
        verbose: The argument of `fit`; 1 for a progress bar, which may be in the current line.
    """
    if verbose:
        print(f"\n{text}" if verbose == 1 else text, flush=True)
    else:
        _logger.info("%s", text)


def space_report(
    directory: str, model: keras.Model, world: Group, keep_last: int | None
) -> str | None:
    """The space that the checkpoints of a model take, and the free space; all ranks must call this.

    Args:
        directory: The directory of the checkpoints.
        model: The model, with a built optimizer.
        world: All ranks.
        keep_last: The number of checkpoints that are kept; None for all.

    Returns:
        The line, with a warning if there is too little space. None on all ranks but the chief.
    """
    arrays, _ = gather_arrays(entries_of(model), world)
    if world.rank:
        return None
    size = sum(math.prod(shape) * item_bytes(dtype) for shape, dtype in arrays.values())
    # An old checkpoint is deleted when the new one was verified.
    needed = size * (1 if keep_last is None else keep_last + 1)
    line = f"A checkpoint takes {as_bytes(size, _DIGITS)}" + (
        ", and all are kept"
        if keep_last is None
        else f", the {keep_last} that are kept and one that is being written "
        f"{as_bytes(needed, _DIGITS)}"
    )
    if is_address(directory):
        return f"{line}."
    free = shutil.disk_usage(directory).free
    line += f"; {as_bytes(free, _DIGITS)} are free in {directory}."
    return line if needed < free else f"{line} This is not enough."
