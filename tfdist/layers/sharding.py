"""Split variables: what part of a global array a rank holds, and how it comes to it.

A layer that splits a weight adds it through `add_split_weight`. From then on the variable carries
a `Sharding`, which all that looks at variables goes by: gradient norms, saving, memory reports.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import checks
from tfdist.collectives import Group, all_gather, all_reduce
from tfdist.collectives.conjugates import reduce

if TYPE_CHECKING:
    from tfdist.optimizers.zero.flat import FlatSharding

__all__ = [
    "Sharding",
    "add_split_weight",
    "check_by_entries",
    "detached",
    "mark_partial_gradient",
    "mark_split",
    "mark_stored_flat",
    "read",
    "replicated_variables",
    "sharding_of",
    "split_variable",
    "stored_flat",
    "tensor_group",
    "whole_value",
]

_MARK = "_tfdist_sharding"
_PARTIAL = "_tfdist_partial_over"
_STORED = "_tfdist_stored_flat"


def tensor_group() -> Group | None:
    """The ranks along the tensor axis of the strategy in scope, or None where there is one rank."""
    strategy: Any = tf.distribute.get_strategy()
    if not hasattr(strategy, "engine") or strategy.mesh.shape["tensor"] == 1:
        return None
    return strategy.group("tensor")


@dataclasses.dataclass(frozen=True)
class Sharding:
    """Which part of a global array a rank's variable is: an equal slice along one axis.

    Attributes:
        group: The ranks that hold the slices, in order.
        axis: The dim that is split.
        shape: The shape of the global array. Where its size along `axis` does not divide, the
            last slices are padded with zeros.
    """

    group: Group
    axis: int
    shape: tuple[int, ...]

    @property
    def share(self) -> int:
        """The size of a slice along `axis`."""
        return math.ceil(self.shape[self.axis] / self.group.size)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a slice."""
        return (*self.shape[: self.axis], self.share, *self.shape[self.axis + 1 :])

    @property
    def padding(self) -> int:
        """How many entries along `axis` all slices have beyond the global array."""
        return self.share * self.group.size - self.shape[self.axis]

    def slice_of(self, whole):
        """This rank's slice of a global array, a NumPy array or a tensor."""
        if tuple(whole.shape) != self.shape:
            raise ValueError(
                f"A global array of shape {self.shape} was expected. Received: {tuple(whole.shape)}."
            )
        if self.padding:
            ends = [(0, self.padding if axis == self.axis else 0) for axis in range(whole.ndim)]
            pad = np.pad if isinstance(whole, np.ndarray) else tf.pad
            whole = pad(whole, ends)
        begin = self.group.rank * self.share
        index = [slice(None)] * len(self.shape)
        index[self.axis] = slice(begin, begin + self.share)
        return whole[tuple(index)]

    def whole_of(self, local, name: str = "shard"):
        """The global array; every member of the group calls this with its own slice."""
        whole = all_gather(local, self.group, self.axis, name=name)
        if not self.padding:
            return whole
        return tf.slice(whole, [0] * len(self.shape), self.shape)


def read(variable) -> tf.Tensor:
    """A variable's value as a layer computes with it, autocast under mixed precision.

    A tensor, where `keras.ops.convert_to_tensor` may return the variable, which a function with a
    gradient of its own would count among its hidden inputs.
    """
    return tf.convert_to_tensor(variable.value)


def detached(part):
    """A copy of a part of an array, NumPy's or a tensor, for what is kept.

    A slice of rows is a view, for as long as it lives the whole array takes memory; so does the
    value of a variable that it is assigned to.
    """
    return np.array(part) if isinstance(part, np.ndarray) else tf.raw_ops.DeepCopy(x=part)


def sharding_of(variable) -> Sharding | None:
    """What part of a global array a Keras variable is; None for one that is whole."""
    return getattr(variable, _MARK, None)


def mark_split(variable, sharding: Sharding) -> None:
    """Says that a variable is a slice; for an optimizer's slots, which follow their parameter."""
    setattr(variable, _MARK, sharding)


def stored_flat(variable) -> FlatSharding | None:
    """Of which array the value of a Keras variable is a flat shard; None where it is an array."""
    return getattr(variable, _STORED, None)


def mark_stored_flat(variable, sharding: FlatSharding) -> None:
    """Says that a variable's value is a flat shard of an array, which may itself be a slice."""
    setattr(variable, _STORED, sharding)


def replicated_variables(model: keras.Model) -> list[tuple[Any, tuple[str, ...]]]:
    """The variables of a model and its optimizer of which several ranks hold the same.

    ZeRO's shards are no two ranks' alike.

    Returns:
        Each with the axes along which it is the same: a slice is another for each rank of the
        tensor axis.
    """
    variables = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        variables += model.optimizer.variables
    return [
        (variable, ("data", "tensor") if sharding_of(variable) is None else ("data",))
        for variable in variables
        if stored_flat(variable) is None and variable.dtype != "string"
    ]


def mark_partial_gradient(variable, group: Group) -> None:
    """Says that a whole variable sees a part of the work, so that its gradients are to be summed.

    The weights of a normalization that runs on a slice of the sequence are such ones. The sum is
    taken with the optimizer's step, for all of them in one collective.
    """
    setattr(variable, _PARTIAL, group)


def partial_gradient_group(variable) -> Group | None:
    """The group over which the gradients of a whole variable are to be summed, or None."""
    return getattr(variable, _PARTIAL, None)


def whole_value(variable, name: str = "shard"):
    """The global array that a variable is or is a part of; every rank calls this."""
    checks.instance("variable", variable, keras.Variable, "a Keras variable")
    checks.text("name", name)
    flat = stored_flat(variable)
    if flat is not None:
        return flat.whole_of(tf.convert_to_tensor(variable._value), name)
    sharding = sharding_of(variable)
    value = tf.convert_to_tensor(variable.value)
    return value if sharding is None else sharding.whole_of(value, name)


def add_split_weight(
    layer: keras.layers.Layer,
    shape: Sequence[int],
    axis: int,
    group: Group | None,
    *,
    name: str,
    initializer,
    regularizer=None,
    constraint=None,
):
    """`layer.add_weight`, of which this rank holds its slice along `axis`.

    The slice is cut from what a single device would have drawn, so a layout changes no value.

    Args:
        layer: The layer.
        shape: The shape of the global array.
        axis: The dim that is split.
        group: The ranks that split it; None for the whole.
        name: The variable's name.
        initializer: For the global array.
        regularizer: A sum over entries, as L1 and L2 are.
        constraint: On the variable's entries one by one.

    Raises:
        ValueError: The regularizer or the constraint looks at the array as a whole.
    """
    shape = tuple(shape)
    if group is None:
        return layer.add_weight(
            shape=shape,
            name=name,
            initializer=initializer,
            regularizer=regularizer,
            constraint=constraint,
        )
    check_by_entries(layer, name, regularizer, constraint)
    sharding = Sharding(group, axis % len(shape), shape)
    initializer = keras.initializers.get(initializer)
    regularizer = keras.regularizers.get(regularizer)
    variable = layer.add_weight(
        shape=sharding.local_shape,
        name=name,
        initializer=lambda _, dtype=None: detached(
            sharding.slice_of(initializer(shape, dtype=dtype))
        ),
        regularizer=None if regularizer is None else _SummedRegularizer(regularizer, group),
        constraint=constraint,
    )
    mark_split(variable, sharding)
    return variable


def split_variable(layer: keras.layers.Layer, variable, axis: int, group: Group) -> Sharding:
    """Cuts a variable that a layer has already to this rank's slice along `axis`, in place.

    Args:
        layer: The layer.
        variable: The variable, whole and with the same value on every rank of the group.
        axis: The dim that is split.
        group: The ranks that split it.

    Returns:
        What part of the global array the variable is now.

    Raises:
        ValueError: Its regularizer or its constraint looks at the array as a whole.
    """
    check_by_entries(layer, variable.name, variable.regularizer, variable.constraint)
    sharding = Sharding(group, axis % len(variable.shape), tuple(variable.shape))
    own = detached(sharding.slice_of(tf.convert_to_tensor(variable.value)))
    with tf.init_scope():
        variable._initialize(own)
    variable._shape = sharding.local_shape
    if variable.regularizer is not None:
        variable.regularizer = _SummedRegularizer(variable.regularizer, group)
    mark_split(variable, sharding)
    return sharding


class _SummedRegularizer(keras.regularizers.Regularizer):
    """The penalty of the global array, of which each rank sees its slice."""

    def __init__(self, regularizer, group: Group):
        self._regularizer = regularizer
        self._group = group

    def __call__(self, value):
        return reduce(self._regularizer(value), self._group, name="regularizer")


_BY_ENTRIES = (
    keras.regularizers.L1,
    keras.regularizers.L2,
    keras.regularizers.L1L2,
    keras.constraints.NonNeg,
)


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


def sum_over_split(values: Sequence, groups: Sequence[Group | None]):
    """Sums scalars, those of split variables over their ranks too, with one collective a group.

    Args:
        values: A scalar tensor of each variable: this rank's part of a sum over its entries.
        groups: The ranks that hold the other parts, or None.

    Returns:
        The scalar tensors, each the sum over the variable's global array.
    """
    totals = list(values)
    for group in dict.fromkeys(group for group in groups if group is not None):
        places = [place for place, other in enumerate(groups) if other == group]
        packed = tf.stack([totals[place] for place in places])
        summed = tf.unstack(all_reduce(packed, group, name="norms"))
        for place, value in zip(places, summed, strict=True):
            totals[place] = value
    return totals
