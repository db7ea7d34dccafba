"""Reports on checkpoints during training: the space that they take."""

from __future__ import annotations

import logging
import math
import shutil

import keras

from tfdist.checkpoint.chunks import item_bytes
from tfdist.checkpoint.entries import entries_of, gather_arrays
from tfdist.collectives import Group
from tfdist.runtime.directories import is_address
from tfdist.utils.quantities import as_bytes

_logger = logging.getLogger("tfdist")

#: Significant digits of sizes in messages.
_DIGITS = 3


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
