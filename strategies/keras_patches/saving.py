"""Saving: all ranks call it, the chief writes the file, and all continue when it is written.

Files contain global arrays, so they load on any mesh and on one device. All ranks raise an exception of the
chief, so that programs that catch it continue in the same way on all ranks.
"""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import file_utils, saving_lib
from tfdist.collectives.objects import all_gather_object
from tfdist.runtime.uncaught import mark_as_anothers
from tfdist.step.context import strategy_of
from tfdist.step.local_steps import global_parameters
from tfdist.strategies.keras_patches.reading import has_parts, reading_parts
from tfdist.strategies.keras_patches.splits import global_arrays, split_variables, whole_values
from tfdist.strategies.keras_patches.synchronization import synchronize_layer_states
from tfdist.utils.temporary import attributes_set

PATCHES = Patches()

#: Strategies of a `fit` that begins, in which callbacks may restore on the chief alone.
restoring: weakref.WeakSet[Any] = weakref.WeakSet()


class _Local(threading.local):
    """The files that this thread reads and writes.

    Attributes:
        reads: Whether it reads a file.
        writes: Whether it is the chief, and writes a file.
        checkpoint: The strategy of the model whose callback saves a checkpoint.
        failed: The chief's exception from creating the folder of the checkpoint.
    """

    reads = False
    writes = False
    checkpoint: Any = None
    failed: OSError | None = None


_local = _Local()


@PATCHES.of(keras.Model, "save", "self", "filepath")
@PATCHES.of(keras.Model, "save_weights", "self", "filepath")
def write_once(self, *args, original, **kwargs):
    """Calls a method that writes files on the chief alone, with variables that are global arrays."""
    return write_some_once(original, self, split_variables(self), *args, **kwargs)


def write_some_once(original, self, split: Sequence, *args, **kwargs):
    """The same for a method that writes only some of the split variables.

    Args:
        original: The method.
        self: The model.
        split: These variables with their layouts, as returned by `split_variables`.
        *args: Arguments of the method.
        **kwargs: Arguments of the method.
    """
    strategy = strategy_of(self)
    if strategy is None or _local.writes:
        return original(self, *args, **kwargs)
    with global_parameters(self):
        if strategy.group().size == 1:
            return original(self, *args, **kwargs)
        synchronize_layer_states(self)
        wholes = whole_values(split, keep=strategy.is_chief)

        def write():
            if _local.failed is not None:
                raise _local.failed
            with attributes_set(_local, writes=True), global_arrays(split, wholes):
                return original(self, *args, **kwargs)

        # Errors show the name of the collective: usually a rank does not call the method.
        return run_on_chief(write, strategy, getattr(original, "__name__", "save"))


def run_on_chief(function, strategy, name: str):
    """Calls a function that writes files on the chief; all ranks call this, and raise its exception.

    Args:
        function: The function.
        strategy: The strategy.
        name: What is called, for messages.

    Returns:
        The result of the function on the chief, None on other ranks.
    """
    result, error = None, None
    if strategy.is_chief:
        try:
            result = function()
        except Exception as raised:
            error = raised
    outcomes = all_gather_object(_packed(error), strategy.group(), name=name)
    if error is not None:
        raise error
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            found = _unpacked(*outcome)
            mark_as_anothers(found)
            found.add_note(
                f"Rank {rank} raised this in `{name}`, which writes files for all ranks."
            )
            raise found
    return result


def _packed(error: Exception | None) -> tuple[bytes, str] | None:
    """An exception for other ranks: pickled, if possible, and as text."""
    if error is None:
        return None
    try:
        # Pickled by name, so that the program can catch the same class on every rank.
        content = pickle.dumps(error)
    except Exception:
        content = b""
    return content, f"{type(error).__name__}: {error}"


def _unpacked(content: bytes, text: str) -> Exception:
    """The exception of another rank; a `RuntimeError` with its text if it cannot be unpickled."""
    try:
        error = pickle.loads(content)
    except Exception:
        error = None
    return error if isinstance(error, Exception) else RuntimeError(text)


@PATCHES.of(keras.callbacks.ModelCheckpoint, "_save_model", "self", "epoch", "batch", "logs")
def save_checkpoint(self, *args, original, **kwargs):
    """Runs a callback that saves; the chief creates the folder first, which may fail."""
    strategy = strategy_of(self.model)
    if strategy is None or strategy.group().size == 1:
        return original(self, *args, **kwargs)
    with attributes_set(_local, checkpoint=strategy, failed=None):
        original(self, *args, **kwargs)
        if _local.failed is not None:
            raise _local.failed  # The callback did not save.


@PATCHES.of(file_utils, "makedirs")
def _make_folder(path, *, original):
    """Creates the folder of a checkpoint; an exception is raised later, when all ranks receive it."""
    if _local.checkpoint is None or _local.writes:
        return original(path)
    if _local.checkpoint.is_chief:
        try:
            original(path)
        except OSError as error:
            _local.failed = error
    return None


@PATCHES.of(keras.Model, "export", "self", "filepath")
def _export(self, *args, original, **kwargs):
    if split_variables(self):
        raise ValueError(
            "`export` is not supported for a model whose weights are split over ranks: an exported program "
            f"runs on one device. Received: {type(self).__name__} `{self.name}`. Save it with `model.save`, "
            "load the file on one device, and export there."
        )
    return write_once(self, *args, original=original, **kwargs)


@PATCHES.of(saving_lib, "_load_state", "saveable", "weights_store")
def _load_state(saveable, *args, original, **kwargs):
    """Reads global arrays in the outermost call, of which this rank stores its parts."""
    if _local.reads or not has_parts(saveable):
        return original(saveable, *args, **kwargs)
    strategy: Any = strategy_of(saveable)
    if strategy is not None and strategy in restoring:
        # The chief alone reads the file, and broadcasts it to the others.
        reading = global_arrays(split_variables(saveable), None, strategy.group())
    else:
        reading = reading_parts(saveable)
    with attributes_set(_local, reads=True), reading:
        return original(saveable, *args, **kwargs)
