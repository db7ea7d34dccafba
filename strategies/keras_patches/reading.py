"""Weights that are read from a file into the part of them that a rank keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdist.backend.keras.attributes import stored_shape, stored_value
from tfdist.backend.keras.functional import defer, without_values
from tfdist.backend.keras.stored import StoredArray, arrays_on_demand
from tfdist.sharding.initializers import SlicedInitializer
from tfdist.sharding.layout import global_shape, layout_of
from tfdist.sharding.parts import NestedSlice, Slice, deep_copy
from tfdist.strategies.keras_patches.splits import split_variables


def has_parts(saveable) -> bool:
    """Whether a rank holds parts of some variables, or has no values for them yet."""
    variables = getattr(saveable, "variables", ())
    return bool(split_variables(saveable)) or any(without_values(each) for each in variables)


@contextlib.contextmanager
def reading_parts(saveable) -> Iterator[None]:
    """Inside, what Keras' loaders assign is a global array, of which a variable takes its part.

    Variables have their global shapes meanwhile. An array of a file in a folder is read only as far
    as it is kept; a variable that has no value yet reads it when it gets one.
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
        deferred, stage = without_values(variable), layout.stage
        if stage is not None and not stage.is_here:
            return value
        if not deferred and layout.slice is None and layout.flat is None:
            return stock(np.asarray(value) if isinstance(value, StoredArray) else value)
        if tuple(value.shape) != tuple(shape):
            raise ValueError(
                f"The weight `{variable.path}` has the shape {tuple(shape)}. Received: an array of "
                f"shape {tuple(value.shape)}, of another model's file."
            )
        if deferred:
            reads_shard = layout.flat is not None and isinstance(value, StoredArray)
            whole = _ShardFromFile(value) if reads_shard else _FromFile(value)
            defer(
                variable, whole if layout.slice is None else SlicedInitializer(whole, layout.slice)
            )
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
    """An initializer that reads the value."""

    def __init__(self, value):
        self._value = value

    def __call__(self, shape, dtype=None):
        return tf.cast(np.asarray(self._value), dtype or "float32")

    def read_slice(self, part: Slice | NestedSlice, dtype=None):
        """The slice of the value."""
        return tf.cast(_slice(self._value, part), dtype or "float32")


class _ShardFromFile(_FromFile):
    """For a variable of which ranks keep shards: it reads its own."""

    def __call__(self, shape, dtype=None):
        return self._value
