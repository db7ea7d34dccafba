"""Weights that are split over the ranks of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import Group, all_reduce
from tfdist.collectives.mappings import reduce_from_region
from tfdist.sharding.layout import VariableLayout, of_the_next_variable, update_layout
from tfdist.sharding.parts import NestedSlice, Slice, SlicedInitializer
from tfdist.step.context import current_step, current_strategy
from tfdist.step.keras_step import with_global_gradient
from tfdist.utils import checks

#: The default axis over which layers are split.
TENSOR_AXIS = "tensor"
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


def axis_group(axis: str) -> Group | None:
    """The ranks along a mesh axis of the strategy in scope; None if there is one rank.

    Raises:
        ValueError: The mesh does not have the axis.
    """
    if not isinstance(axis, str) or not axis.isidentifier():
        raise checks.refuse("axis", axis, "the name of a mesh axis")
    strategy = current_strategy()
    if strategy is None:
        return None
    checks.one_of("axis", axis, tuple(strategy.mesh.shape))
    return None if strategy.mesh.shape[axis] == 1 else strategy.group(axis)


def tensor_group() -> Group | None:
    """The ranks along the tensor axis of the strategy in scope; None if there is one rank."""
    return axis_group(TENSOR_AXIS)


def token_group() -> Group | None:
    """The ranks with different tokens of the same sequences; None if there is one rank."""
    strategy = current_strategy()
    group = None if strategy is None else strategy.token_group
    return None if group is None or group.size == 1 else group


def value_tensor(variable) -> tf.Tensor:
    """The value of a variable for computations in a layer, autocast under mixed precision.

    Always a tensor. `keras.ops.convert_to_tensor` may return the variable, which a function with a custom
    gradient would capture.
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
    """Adds a weight to a layer, as `layer.add_weight`, of which this rank holds its slice along `dim`.

    The initial slice is cut from the array of a single device, so values do not depend on the layout.

    Args:
        layer: The layer.
        shape: The shape of the global array.
        dim: The dim to split.
        axis: The mesh axis whose ranks split it, or their group. The weight is whole if there is one rank.
        name: The variable's name.
        initializer: The initializer of the global array.
        regularizer: A sum over entries, such as L1 and L2.
        constraint: A constraint on single entries.
        sizes: The size of each rank's slice along `dim`; None for equal slices.

    Raises:
        ValueError: The regularizer or the constraint depends on the whole array, or the sizes do not sum to
            the size of the array.
    """
    checks.instance("layer", layer, keras.layers.Layer, "a Keras layer")
    shape = tuple(checks.integers("shape", shape, minimum=1))
    dim = checks.integer("dim", dim, minimum=-len(shape), maximum=len(shape) - 1)
    group = axis_group(axis) if isinstance(axis, str) else axis
    checks.instance("axis", group, Group, "the name of a mesh axis, or a Group", optional=True)
    checks.text("name", name)
    rules = {"initializer": initializer, "regularizer": regularizer, "constraint": constraint}
    for rule, value in rules.items():
        if rule == "initializer" or value is not None:
            _check_identified(rule, value)
    sizes = checks.integers("sizes", sizes, minimum=0, optional=True)
    if sizes is not None:
        if group is None or len(sizes) != group.size or sum(sizes) != shape[dim]:
            raise checks.refuse("sizes", sizes, f"a size for each rank, {shape[dim]} in total")
        sizes = tuple(sizes)
    part = None if group is None else Slice(group, dim % len(shape), shape, sizes)
    return add_weight_part(layer, shape, part, name=name, **rules)


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
    """Adds a weight to a layer, as `layer.add_weight`, of which this rank holds a part; None for all of it.

    The other arguments are those of `add_split_weight`.

    Raises:
        ValueError: The regularizer or the constraint depends on the whole array.
    """
    layout = None
    if part is not None:
        check_by_entries(layer, name, regularizer, constraint)
        layout, shape = VariableLayout(slice=part), part.local_shape
        initializer = SlicedInitializer(keras.initializers.get(initializer), part)
        if regularizer is not None:
            regularizer = SummedRegularizer(keras.regularizers.get(regularizer), part)
    with of_the_next_variable(layout):
        return layer.add_weight(
            shape=shape,
            name=name,
            initializer=initializer,
            regularizer=regularizer,
            constraint=constraint,
        )


class SummedRegularizer(keras.regularizers.Regularizer):
    """The penalty of a global array, from the slices of the ranks."""

    def __init__(self, regularizer, part: Slice | NestedSlice):
        self.whole = regularizer
        self._part = part

    def __call__(self, value):
        """The penalty; `value` is this rank's slice."""
        penalty = self.whole(value)
        strategy = current_strategy()
        rows = () if strategy is None else strategy.mesh.gradient_axes
        has_other_losses = False
        for level in reversed(self._part.levels):
            if any(axis in rows for axis in level.group.axes):
                # The losses of the other ranks contain this penalty, too.
                penalty = all_reduce(penalty, level.group, name="regularizer")
                has_other_losses = True
            else:
                penalty = reduce_from_region(penalty, level.group, name="regularizer")
        return with_global_gradient(penalty, current_step()) if has_other_losses else penalty


class DividedRegularizer(keras.regularizers.Regularizer):
    """The penalty of a whole weight whose gradients the ranks of a group sum: each has a share of its gradient."""

    def __init__(self, regularizer, group: Group):
        self.whole = regularizer
        self._group = group

    def __call__(self, value):
        """The penalty; `value` is the whole weight."""
        penalty = tf.convert_to_tensor(self.whole(value))
        share = penalty / self._group.size
        return share + tf.stop_gradient(penalty - share)


def sum_gradient_over(variable, group: Group | None) -> None:
    """Has the gradient of a whole weight summed over a group, of which each rank computes a part; None: not.

    The penalty of its regularizer counts once in that sum.
    """
    own = variable.regularizer
    own = own.whole if isinstance(own, DividedRegularizer) else own
    variable.regularizer = own if own is None or group is None else DividedRegularizer(own, group)
    update_layout(variable, partial_over=group)


def _check_identified(name: str, value: Any) -> None:
    """Checks that Keras finds the initializer, regularizer or constraint of a value.

    Raises:
        ValueError: It does not.
    """
    error = checks.refuse(name, value, f"a Keras {name}, or the name of one")
    try:
        found = getattr(keras, f"{name}s").get(value)
    except (ValueError, TypeError, OverflowError) as cause:
        raise error from cause
    if not callable(found) or (isinstance(value, type) and not issubclass(value, _RULES)):
        raise error


def check_by_entries(layer, name: str, regularizer, constraint) -> None:
    """Checks that the regularizer and the constraint of a split weight treat entries separately.

    Raises:
        ValueError: One of them depends on the whole weight.
    """
    for rule in (keras.regularizers.get(regularizer), keras.constraints.get(constraint)):
        if rule is not None and not isinstance(rule, _BY_ENTRIES):
            raise ValueError(
                f"The {name} of `{layer.name}` is split over ranks, so its regularizer must be a sum "
                "over entries (L1, L2, L1L2), and its constraint must be NonNeg. Received: "
                f"{rule!r}."
            )
