"""Saving: every rank calls it, the chief alone writes, and all go on when the file is there.

Files hold global arrays, so they load on any mesh and on one device.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.collectives import barrier
from tfdist.context import strategy_of
from tfdist.keras_internals.patching import Patch
from tfdist.keras_internals.private import saving_lib
from tfdist.strategies.keras_patches.local_steps import global_parameters
from tfdist.strategies.keras_patches.reading import has_parts, reading_parts
from tfdist.strategies.keras_patches.splits import split_variables, standing_in, whole_values
from tfdist.strategies.keras_patches.synchronization import synchronize_layer_states

__all__ = ["PATCHES", "write_once", "write_some_once"]

_loading, _writing = threading.local(), threading.local()


def write_once(original, self, *args, **kwargs):
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
    if strategy is None or getattr(_writing, "under_way", False):
        return original(self, *args, **kwargs)
    with global_parameters(self):
        return _write_agreed(original, self, split, strategy, *args, **kwargs)


def _write_agreed(original, self, split: Sequence, strategy, *args, **kwargs):
    if strategy.group().size == 1:
        return original(self, *args, **kwargs)
    synchronize_layer_states(self)
    wholes = whole_values(split, keep=strategy.is_chief)
    result = None
    if strategy.is_chief:
        _writing.under_way = True
        try:
            with standing_in(split, wholes):
                result = original(self, *args, **kwargs)
        finally:
            _writing.under_way = False
    # By the method's name, which errors show: a rank that does not call it is the usual mistake.
    barrier(strategy.group(), name=getattr(original, "__name__", "save"))
    return result


def _export(original, self, *args, **kwargs):
    if split_variables(self):
        raise ValueError(
            "An exported program runs on one device. Received: `export` on a model whose weights "
            "are split over ranks. Save it with `model.save`, load that on one device, and "
            "export there."
        )
    return write_once(original, self, *args, **kwargs)


def _load_state(original, saveable, *args, **kwargs):
    """The outermost call reads global arrays, of which this rank keeps its parts."""
    if getattr(_loading, "under_way", False) or not has_parts(saveable):
        return original(saveable, *args, **kwargs)
    _loading.under_way = True
    try:
        strategy: Any = strategy_of(saveable)
        if strategy is not None and strategy.extended.restores:
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
    Patch(saving_lib, "_load_state", ("saveable", "weights_store"), _load_state),
)
