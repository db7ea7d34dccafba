"""Weights that are read from a file into the parts that a rank holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.backend.keras.attributes import stored_shape, stored_value
from tfdist.backend.keras.functional import defer, is_deferred
from tfdist.backend.keras.stored import StoredArray, arrays_on_demand
from tfdist.sharding.layout import global_shape, layout_of
from tfdist.sharding.parts import NestedSlice, Slice, SlicedInitializer, deep_copy
from tfdist.strategies.keras_patches.splits import split_variables


def has_parts(saveable) -> bool:
    """Whether a rank holds parts of some variables, or some are not initialized yet."""
    variables = getattr(saveable, "variables", ())
    return bool(split_variables(saveable)) or any(is_deferred(each) for each in variables)


@contextlib.contextmanager
def reading_parts(saveable) -> Iterator[None]:
    """Inside, Keras' loaders assign global arrays to variables, which store their parts.

    Variables have their global shapes inside. Of arrays in a folder only the needed parts are read. A variable
    without a value reads its part when it is initialized.
    """
    variables = {id(each): each for each in getattr(saveable, "variables", ())}
    variables |= {id(variable): variable for variable, _ in split_variables(saveable)}
    shapes = [(variable, stored_shape(variable)) for variable in variables.values()]
    for variable, _ in shapes:
        vars(variable)["assign"] = _assigning(variable, variable.assign)
        stored_shape.set(variable, global_shape(variable))
    try:
        with arrays_on_demand():
            yield
    finally:
        for variable, shape in shapes:
            vars(variable).pop("assign")
            stored_shape.set(variable, shape)


def _assigning(variable, stock):
    layout, shape = layout_of(variable), global_shape(variable)

    def assign(value):
        deferred, stage = is_deferred(variable), layout.stage
        if stage is not None and not stage.is_here:
            return value
        if not deferred and layout.slice is None and layout.flat is None:
            return stock(np.asarray(value) if isinstance(value, StoredArray) else value)
        if tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"The weight `{variable.path}` requires an array of shape {tuple(shape)}. Received: shape "
                f"{tuple(value.shape)}, from the file of another model."
            )
        if deferred:
            reads_shard = layout.flat is not None and isinstance(value, StoredArray)
            first: Any = _ShardFromFile(value) if reads_shard else _FromFile(value)
            if layout.slice is not None:
                first = SlicedInitializer(first, layout.slice)
            defer(variable, first)
            return value
        part = value if layout.slice is None else _slice(value, layout.slice)
        if layout.flat is not None:
            part = layout.flat.read(part)
        own = stored_value(variable)
        own.assign(deep_copy(tf.cast(part, own.dtype)))
        return value

    return assign


def _slice(value, part: Slice | NestedSlice) -> np.ndarray:
    if not isinstance(value, StoredArray) or part.padding:
        return part.slice_of(np.asarray(value))
    return part.read(value)


class _FromFile:
    """An initializer that reads a value."""

    def __init__(self, value):
        self._value = value

    def __call__(self, shape, dtype=None):
        return tf.cast(np.asarray(self._value), dtype or "float32")

    def read_slice(self, part: Slice | NestedSlice, dtype=None):
        """The slice of the value."""
        return tf.cast(_slice(self._value, part), dtype or "float32")


class _ShardFromFile(_FromFile):
    """For a sharded variable, which reads its shard itself."""

    def __call__(self, shape, dtype=None):
        return self._value
