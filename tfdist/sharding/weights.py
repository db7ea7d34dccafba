"""Weights of which each rank of an axis holds a slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import stored_shape
from tfdist.backend.keras.functional import defer, deferred_initializer, without_values
from tfdist.backend.keras.variables import renew
from tfdist.collectives import Group, all_reduce
from tfdist.collectives.mappings import reduce_from_region
from tfdist.sharding.initializers import SlicedInitializer
from tfdist.sharding.layout import (
    VariableLayout,
    layout_of,
    of_the_next_variable,
    update_layout,
)
from tfdist.sharding.parts import NestedSlice, Slice, deep_copy
from tfdist.step.context import current_step, current_strategy
from tfdist.step.keras_step import with_global_gradient
from tfdist.utils import checks

#: The axis that layers split over unless they are told another.
TENSOR_AXIS = "tensor"


def axis_group(axis: str) -> Group | None:
    """The ranks along a mesh axis of the strategy in scope, or None where there is one rank.

    Raises:
        ValueError: The mesh has no such axis.
    """
    if not isinstance(axis, str) or not axis.isidentifier():
        raise checks.refuse("axis", axis, "the name of a mesh axis")
    strategy = current_strategy()
    if strategy is not None:
        checks.one_of("axis", axis, tuple(strategy.mesh.shape))
    if strategy is None or strategy.mesh.shape[axis] == 1:
        return None
    return strategy.group(axis)


def tensor_group() -> Group | None:
    """The ranks along the tensor axis of the strategy in scope, or None where there is one rank."""
    return axis_group(TENSOR_AXIS)


def token_group() -> Group | None:
    """The ranks that have other tokens of the same sequences, or None where there is one rank."""
    strategy = current_strategy()
    group = None if strategy is None else strategy.token_group
    return None if group is None or group.size == 1 else group


def value_tensor(variable) -> tf.Tensor:
    """A variable's value as a layer computes with it, autocast under mixed precision.

    A tensor, where `keras.ops.convert_to_tensor` may return the variable, which a function with a
    gradient of its own would count among its hidden inputs.
    """
    return tf.convert_to_tensor(variable.value)


def add_split_weight(
    layer: keras.layers.Layer,
    shape: Sequence[int],
    dim: int,
    *,
    axis: str | Group | None = TENSOR_AXIS,
    name: str,
    initializer: Any,
    regularizer: Any = None,
    constraint: Any = None,
    sizes: Sequence[int] | None = None,
):
    """`layer.add_weight`, of which this rank holds its slice along `dim`.

    The slice is cut from what a single device would have drawn, so a layout changes no value.

    Args:
        layer: The layer.
        shape: The shape of the global array.
        dim: The dim that is split.
        axis: The mesh axis whose ranks split it, or their group; whole where there is one rank.
        name: The variable's name.
        initializer: For the global array.
        regularizer: A sum over entries, as L1 and L2 are.
        constraint: On the variable's entries one by one.
        sizes: The size of each rank's slice along `dim`; None for equal ones.

    Raises:
        ValueError: The regularizer or the constraint looks at the array as a whole, or the sizes do
            not sum to the array's.
    """
    checks.instance("layer", layer, keras.layers.Layer, "a Keras layer")
    shape = tuple(checks.integers("shape", shape, minimum=1))
    dim = checks.integer("dim", dim, minimum=-len(shape), maximum=len(shape) - 1)
    group = axis_group(axis) if isinstance(axis, str) else axis
    checks.instance("axis", group, Group, "the name of a mesh axis, or a Group", optional=True)
    checks.text("name", name)
    _check_identified("initializer", initializer, keras.initializers.get)
    for rule, value, get in (
        ("regularizer", regularizer, keras.regularizers.get),
        ("constraint", constraint, keras.constraints.get),
    ):
        if value is not None:
            _check_identified(rule, value, get)
    sizes = checks.integers("sizes", sizes, minimum=0, optional=True)
    if sizes is not None and (
        group is None or len(sizes) != group.size or sum(sizes) != shape[dim]
    ):
        raise checks.refuse("sizes", sizes, f"a size for each rank, {shape[dim]} in all")
    part = (
        None
        if group is None
        else Slice(group, dim % len(shape), shape, None if sizes is None else tuple(sizes))
    )
    return add_weight_part(
        layer,
        shape,
        part,
        name=name,
        initializer=initializer,
        regularizer=regularizer,
        constraint=constraint,
    )


def add_weight_part(
    layer: keras.layers.Layer,
    shape: Sequence[int],
    part: Slice | NestedSlice | None,
    *,
    name: str,
    initializer: Any,
    regularizer: Any = None,
    constraint: Any = None,
):
    """`layer.add_weight`, of which this rank holds a part; None for the whole.

    The other arguments are those of `add_split_weight`.

    Raises:
        ValueError: The regularizer or the constraint looks at the array as a whole.
    """
    if part is None:
        return layer.add_weight(
            shape=shape,
            name=name,
            initializer=initializer,
            regularizer=regularizer,
            constraint=constraint,
        )
    check_by_entries(layer, name, regularizer, constraint)
    initializer = keras.initializers.get(initializer)
    regularizer = keras.regularizers.get(regularizer)
    with of_the_next_variable(VariableLayout(slice=part)):
        return layer.add_weight(
            shape=part.local_shape,
            name=name,
            initializer=SlicedInitializer(initializer, part),
            regularizer=None if regularizer is None else _SummedRegularizer(regularizer, part),
            constraint=constraint,
        )


def split_variable(layer: keras.layers.Layer, variable, dim: int, group: Group) -> Slice:
    """Cuts a variable that a layer has already to this rank's slice along `dim`, in place.

    Args:
        layer: The layer.
        variable: The variable, whole and with the same value on every rank of the group.
        dim: The dim that is split.
        group: The ranks that split it.

    Returns:
        What part of the global array the variable is now.

    Raises:
        ValueError: Its regularizer or its constraint looks at the array as a whole.
    """
    part = Slice(group, dim % len(variable.shape), tuple(variable.shape))
    cut_variable(layer, variable, part)
    return part


def cut_variable(layer: keras.layers.Layer, variable, part: Slice | NestedSlice) -> None:
    """Cuts a variable that a layer has already to this rank's part of it, in place.

    Raises:
        ValueError: Its regularizer or its constraint looks at the array as a whole.
    """
    check_by_entries(layer, variable.name, variable.regularizer, variable.constraint)
    if without_values(variable):
        defer(variable, SlicedInitializer(deferred_initializer(variable), part))
    else:
        renew(variable, deep_copy(part.slice_of(tf.convert_to_tensor(variable.value))))
    stored_shape.set(variable, part.local_shape)
    if variable.regularizer is not None:
        variable.regularizer = _SummedRegularizer(variable.regularizer, part)
    update_layout(variable, slice=part)


def join_variable(variable) -> None:
    """Makes a variable that `split_variable` has cut whole again, in place; every rank calls it."""
    part = layout_of(variable).slice
    if part is None:
        return
    if without_values(variable):
        defer(variable, deferred_initializer(variable).whole)
    else:
        renew(variable, part.all_gather(tf.convert_to_tensor(variable.value), variable.path))
    stored_shape.set(variable, part.shape)
    if isinstance(variable.regularizer, _SummedRegularizer):
        variable.regularizer = variable.regularizer.whole
    update_layout(variable, slice=None)


class _SummedRegularizer(keras.regularizers.Regularizer):
    """The penalty of the global array, of which each rank sees its slice."""

    def __init__(self, regularizer, part: Slice | NestedSlice):
        self.whole = regularizer
        self._part = part

    def __call__(self, value):
        penalty = self.whole(value)
        strategy = current_strategy()
        rows = () if strategy is None else strategy.mesh.gradient_axes
        of_others = False
        for level in reversed(self._part.levels):
            if any(axis in rows for axis in level.group.axes):
                # The other ranks have losses of their own, each with this penalty in it.
                penalty = all_reduce(penalty, level.group, name="regularizer")
                of_others = True
            else:
                penalty = reduce_from_region(penalty, level.group, name="regularizer")
        return with_global_gradient(penalty, current_step()) if of_others else penalty


_BY_ENTRIES = (
    keras.regularizers.L1,
    keras.regularizers.L2,
    keras.regularizers.L1L2,
    keras.constraints.NonNeg,
)


_RULES = (
    keras.initializers.Initializer,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
)


def _check_identified(name: str, value: Any, get: Callable[[Any], Any]) -> None:
    """Raises ValueError where Keras finds no initializer, regularizer or constraint of that name."""
    try:
        found = get(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise checks.refuse(name, value, f"a Keras {name}, or the name of one") from error
    is_class = isinstance(value, type) and not issubclass(value, _RULES)
    if is_class or not callable(found):
        raise checks.refuse(name, value, f"a Keras {name}, or the name of one")


def check_by_entries(layer, name: str, *rules) -> None:
    """Raises for a regularizer or a constraint that looks at a weight as a whole.

    Raises:
        ValueError: There is one.
    """
    for rule in rules:
        if rule is None:
            continue
        found = rule
        if not isinstance(rule, keras.regularizers.Regularizer | keras.constraints.Constraint):
            for get in (keras.regularizers.get, keras.constraints.get):
                try:
                    found = get(rule)
                    break
                except ValueError:
                    continue
        if not isinstance(found, _BY_ENTRIES):
            raise ValueError(
                f"The {name} of `{layer.name}` is split over ranks, so its regularizer is a sum "
                "over entries (L1, L2, L1L2), and its constraint NonNeg. Received: "
                f"{found!r}."
            )
