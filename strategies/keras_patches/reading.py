"""Weights that are read from a file into the part of them that a rank keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdist.keras_internals.attributes import stored_value
from tfdist.keras_internals.functional import defer, without_values
from tfdist.keras_internals.stored import StoredArray, arrays_on_demand
from tfdist.sharding.layout import global_shape, layout_of
from tfdist.sharding.parts import Slice, deep_copy

__all__ = ["has_parts", "reading_parts"]


def has_parts(saveable) -> bool:
    """Whether a rank holds parts of some variables, or has no values for them yet."""
    return any(
        without_values(variable) or layout_of(variable).slice or layout_of(variable).flat
        for variable in getattr(saveable, "variables", ())
    )


@contextlib.contextmanager
def reading_parts(saveable) -> Iterator[None]:
    """Inside, what Keras' loaders assign is a global array, of which a variable takes its part.

    An array of a file in a folder is read only as far as it is kept. A variable that has no value
    yet reads it when it gets one.
    """
    variables = {id(v): v for v in getattr(saveable, "variables", ())}
    optimizer = getattr(saveable, "optimizer", None)
    variables |= {id(v): v for v in getattr(optimizer, "variables", ())}
    for variable in variables.values():
        vars(variable)["assign"] = _assigning(variable, variable.assign)
    try:
        with arrays_on_demand():
            yield
    finally:
        for variable in variables.values():
            vars(variable).pop("assign", None)


def _assigning(variable, stock):
    def assign(value):
        layout = layout_of(variable)
        is_part = layout.slice is not None or layout.flat is not None
        if not is_part and not without_values(variable):
            return stock(np.asarray(value) if isinstance(value, StoredArray) else value)
        shape = global_shape(variable)
        if tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"The weight `{variable.path}` has the shape {tuple(shape)}. Received: an array of "
                f"shape {tuple(value.shape)}, of another model's file."
            )
        if without_values(variable):
            defer(variable, _FromFile(value, layout.slice))
            return value
        part = _slice(value, layout.slice)
        part = part if layout.flat is None else layout.flat.local_shard(part)
        own = stored_value(variable)
        own.assign(deep_copy(tf.cast(part, own.dtype)))
        return value

    return assign


def _slice(value, part: Slice | None):
    if part is None:
        return np.asarray(value)
    if not isinstance(value, StoredArray) or part.padding:
        return part.slice_of(np.asarray(value))
    begin = part.group.rank * part.share
    index = [slice(None)] * len(part.shape)
    index[part.dim] = slice(begin, begin + part.share)
    return value.read(tuple(index))


class _FromFile:
    """An initializer that reads the value, or the slice of it that a variable is."""

    def __init__(self, value, part: Slice | None):
        self._value, self._part = value, part

    def __call__(self, shape, dtype=None):
        return tf.cast(_slice(self._value, self._part), dtype or "float32")
