"""Variables of built layers, reduced to slices in place and made whole again."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import stored_shape, stored_value
from tfdist.backend.keras.functional import defer, deferred_initializer, is_deferred
from tfdist.backend.keras.variables import renew
from tfdist.collectives import Group
from tfdist.sharding.layout import layout_of, update_layout
from tfdist.sharding.parts import NestedSlice, Slice, SlicedInitializer, deep_copy
from tfdist.sharding.weights import SummedRegularizer, check_by_entries
from tfdist.zero.sharded_variable import ShardedVariable


def split_variable(layer: keras.layers.Layer, variable, dim: int, group: Group) -> Slice:
    """Reduces a variable of a layer to this rank's slice along `dim`, in place.

    Args:
        layer: The layer.
        variable: The variable, whole and with the same value on every rank of the group.
        dim: The dim to split.
        group: The ranks that split it.

    Returns:
        This rank's slice of the global array.

    Raises:
        ValueError: Its regularizer or its constraint depends on the whole array.
    """
    part = Slice(group, dim % len(variable.shape), tuple(variable.shape))
    slice_variable(layer, variable, part)
    return part


def slice_variable(layer: keras.layers.Layer, variable, part: Slice | NestedSlice) -> None:
    """Reduces a variable of a layer to this rank's part of it, in place.

    Raises:
        ValueError: Its regularizer or its constraint depends on the whole array.
    """
    check_by_entries(layer, variable.name, variable.regularizer, variable.constraint)
    if is_deferred(variable):
        defer(variable, SlicedInitializer(deferred_initializer(variable), part))
    else:
        renew(variable, deep_copy(part.slice_of(tf.convert_to_tensor(variable.value))))
    stored_shape.set(variable, part.local_shape)
    if variable.regularizer is not None:
        variable.regularizer = SummedRegularizer(variable.regularizer, part)
    update_layout(variable, slice=part)


def unslice_variable(variable) -> None:
    """Makes a variable that `split_variable` has split whole again, in place; all ranks must call it."""
    part = layout_of(variable).slice
    if part is None:
        return
    if is_deferred(variable):
        defer(variable, deferred_initializer(variable).whole)
    else:
        renew(variable, part.all_gather(tf.convert_to_tensor(variable.value), variable.path))
    stored_shape.set(variable, part.shape)
    if isinstance(variable.regularizer, SummedRegularizer):
        variable.regularizer = variable.regularizer.whole
    update_layout(variable, slice=None)


def unshard_variable(variable: keras.Variable) -> None:
    """Makes a sharded variable ordinary again, with the whole array; all ranks must call this."""
    if not isinstance(variable, ShardedVariable):
        return
    whole = None if stored_value(variable) is None else tf.convert_to_tensor(variable.value)
    variable.__class__ = keras.Variable
    update_layout(variable, flat=None)
    if whole is not None:
        renew(variable, whole)
