"""Saving: every rank calls it, the chief alone writes, and all go on when the file is there.

Files hold global arrays, so they load on any mesh and on one device. What the chief raises while it
writes all ranks raise, so that a program that catches it goes on alike on all.
"""

from __future__ import annotations

import pickle
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.backend.keras.patching import Patch
from tfdist.backend.keras.private import file_utils, saving_lib
from tfdist.collectives.objects import all_gather_object
from tfdist.step.context import strategy_of
from tfdist.strategies.keras_patches.local_steps import global_parameters
from tfdist.strategies.keras_patches.reading import has_parts, reading_parts
from tfdist.strategies.keras_patches.splits import split_variables, standing_in, whole_values
from tfdist.strategies.keras_patches.synchronization import synchronize_layer_states

#: Strategies of a `fit` that begins, where some callbacks restore on the chief alone.
restoring: weakref.WeakSet[Any] = weakref.WeakSet()
_loading = threading.local()


class _Writing(threading.local):
    """What this thread is about to write.

    Attributes:
        under_way: Whether the chief writes.
        checkpoint: Whose callback is about to save a checkpoint: the strategy of its model.
        failed: What the chief raised when it made the folder for it.
    """

    under_way = False
    checkpoint: Any = None
    failed: OSError | None = None


_writing = _Writing()


def write_once(self, *args, original, **kwargs):
    """Calls a method that writes files on the chief alone, where all variables are global arrays."""
    return write_some_once(original, self, split_variables(self), *args, **kwargs)


def write_some_once(original, self, split: Sequence, *args, **kwargs):
    """The same, where what is written needs no more of the split variables than some.

    Args:
        original: The method.
        self: The model.
        split: Those variables, with their layouts, as of `split_variables`.
        *args: For the method.
        **kwargs: For the method.
    """
    strategy = strategy_of(self)
    if strategy is None or _writing.under_way:
        return original(self, *args, **kwargs)
    with global_parameters(self):
        return _write_agreed(original, self, split, strategy, *args, **kwargs)


def _write_agreed(original, self, split: Sequence, strategy, *args, **kwargs):
    if strategy.group().size == 1:
        return original(self, *args, **kwargs)
    synchronize_layer_states(self)
    wholes = whole_values(split, keep=strategy.is_chief)
    result, error = None, None
    if strategy.is_chief:
        _writing.under_way = True
        try:
            if _writing.failed is not None:
                raise _writing.failed
            with standing_in(split, wholes):
                result = original(self, *args, **kwargs)
        except Exception as raised:
            error = raised
        finally:
            _writing.under_way = False
    # By the method's name, which errors show: a rank that does not call it is the usual mistake.
    name = getattr(original, "__name__", "save")
    outcomes = all_gather_object(_packed(error), strategy.group(), name=name)
    if error is not None:
        raise error
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            found = _unpacked(*outcome)
            found.add_note(f"Rank {rank} raised this in `{name}`, where it writes for all.")
            raise found
    return result


def _packed(error: Exception | None) -> tuple[bytes, str] | None:
    """An exception for other ranks: itself, where it pickles, and in words."""
    if error is None:
        return None
    try:
        # By name, so that what the program catches is its own class on every rank.
        content = pickle.dumps(error)
    except Exception:
        content = b""
    return content, f"{type(error).__name__}: {error}"


def _unpacked(content: bytes, words: str) -> Exception:
    """The exception of another rank; a `RuntimeError` in its words where it does not pickle."""
    try:
        error = pickle.loads(content)
    except Exception:
        error = None
    return error if isinstance(error, Exception) else RuntimeError(words)


def save_checkpoint(self, *args, original, **kwargs):
    """A callback that saves: it makes the folder before, on the chief alone, which may fail there."""
    strategy = strategy_of(self.model)
    if strategy is None or strategy.group().size == 1:
        return original(self, *args, **kwargs)
    _writing.checkpoint = strategy
    try:
        original(self, *args, **kwargs)
        if _writing.failed is not None:
            raise _writing.failed  # Nothing was saved there after all.
    finally:
        _writing.checkpoint = _writing.failed = None


def _make_folder(path, *, original):
    """The folder of a checkpoint: what the chief raises there it raises where all ranks hear of it."""
    if _writing.checkpoint is None or _writing.under_way:
        return original(path)
    if _writing.checkpoint.is_chief:
        try:
            original(path)
        except OSError as error:
            _writing.failed = error
    return None


def _export(self, *args, original, **kwargs):
    if split_variables(self):
        raise ValueError(
            "An exported program runs on one device. Received: `export` on a model whose weights "
            "are split over ranks. Save it with `model.save`, load that on one device, and "
            "export there."
        )
    return write_once(self, *args, original=original, **kwargs)


def _load_state(saveable, *args, original, **kwargs):
    """The outermost call reads global arrays, of which this rank keeps its parts."""
    if getattr(_loading, "under_way", False) or not has_parts(saveable):
        return original(saveable, *args, **kwargs)
    _loading.under_way = True
    try:
        strategy: Any = strategy_of(saveable)
        if strategy is not None and strategy in restoring:
            # The chief alone reads the file, and the others get their slices of it.
            with standing_in(split_variables(saveable), None, strategy.group()):
                return original(saveable, *args, **kwargs)
        with reading_parts(saveable):
            return original(saveable, *args, **kwargs)
    finally:
        _loading.under_way = False


PATCHES = (
    Patch(keras.Model, "save", ("self", "filepath"), write_once),
    Patch(keras.Model, "save_weights", ("self", "filepath"), write_once),
    Patch(keras.Model, "export", ("self", "filepath"), _export),
    Patch(file_utils, "makedirs", ("path",), _make_folder),
    Patch(saving_lib, "_load_state", ("saveable", "weights_store"), _load_state),
)
