"""What a variable is on a mesh: one `VariableLayout`, and all that follows from it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import stored_dtype, stored_value
from tfdist.collectives import Group, all_reduce, broadcast
from tfdist.mesh import Mesh
from tfdist.sharding.parts import FlatShard, NestedSlice, Slice
from tfdist.step.context import DistributedStrategy, strategy_of
from tfdist.utils import checks

_ATTRIBUTE = "_tfdist_layout"


@dataclasses.dataclass(frozen=True)
class Stage:
    """That a variable belongs to a pipeline's stage.

    Attributes:
        group: The ranks of the pipeline.
        holders: The places in it of those that hold the variable: a tied weight lies on several.
    """

    group: Group
    holders: tuple[int, ...]

    @property
    def is_here(self) -> bool:
        """Whether this rank holds it."""
        return self.group.rank in self.holders

    @property
    def counts(self) -> bool:
        """Whether this rank's copy is the one that sums over all variables count."""
        return self.group.rank == self.holders[0]


@dataclasses.dataclass(frozen=True)
class VariableLayout:
    """What part of a global array a rank's variable is.

    A variable without a layout is replicated: all ranks hold the same, and its gradient is summed
    over all ranks that have other rows or tokens.

    Attributes:
        slice: The slice along a dim that the variable is, as in tensor parallelism, or along two.
            None: all dims are whole.
        flat: The flat shard of the array, or of its slice, that the variable's value is (ZeRO-3, and
            optimizer state under ZeRO). None: the value has the array's dims.
        state: Of a parameter that is whole itself: the flat shard of it for which this rank has the
            optimizer's state (ZeRO 1 and 2).
        stage: The pipeline's stage that the variable belongs to.
        partial_over: The ranks, beside those of `gradient_axes`, over whose gradients the variable's
            is a sum: each of them sees a part of the work. The weights of a normalization that runs
            on a slice of the sequence are such.
        local_over: The mesh axes along which each rank has a value of its own between two syncs of an
            optimizer that is a `LocalSteps`: those of parameters, and of the optimizer inside.
        same_on_all_ranks: Of a state that its layer updates: whether every rank computes the same
            value, because it follows the rows of all ranks.
    """

    slice: Slice | NestedSlice | None = None
    flat: FlatShard | None = None
    state: FlatShard | None = None
    stage: Stage | None = None
    partial_over: Group | None = None
    local_over: tuple[str, ...] = ()
    same_on_all_ranks: bool = False

    @property
    def is_spread(self) -> bool:
        """Whether a rank has a part only of a model's gradients, as the optimizer applies them."""
        return any(part is not None for part in (self.slice, self.flat, self.state, self.stage))

    @property
    def gradient_shard(self) -> FlatShard | None:
        """The flat shard that the optimizer applies of the gradient."""
        return self.flat or self.state

    @property
    def counts(self) -> bool:
        """Whether sums over all variables of all stages count this rank's."""
        return self.stage is None or self.stage.counts

    def gradient_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The mesh axes over which the gradient is summed: not those that split the variable."""
        split = () if self.slice is None else self.slice.group.axes
        return tuple(axis for axis in mesh.gradient_axes if axis not in split)

    def has_global_gradient(self, mesh: Mesh) -> bool:
        """Whether a rank's gradient is of the global loss, not of its own: see `tfdist.step.context`.

        Where ranks that split a variable have other rows or tokens, each computes for the others.
        """
        split = () if self.slice is None else self.slice.group.axes
        return any(axis in mesh.gradient_axes for axis in split)

    def reduction(self, mesh: Mesh, step: Any) -> str:
        """By which reduction over the ranks of `gradient_axes` the gradient becomes that of the step.

        Args:
            mesh: The mesh.
            step: The Keras step under way, or None.
        """
        return "sum" if step is None or self.has_global_gradient(mesh) else "mean"

    def replicated_axes(self, mesh: Mesh, *, after_sync: bool = False) -> tuple[str, ...]:
        """The mesh axes along which all ranks hold the same part.

        Args:
            mesh: The mesh.
            after_sync: Whether those of `local_over` are among them.
        """
        parts = (self.slice, self.flat, self.stage)
        split = {axis for part in parts if part is not None for axis in part.group.axes}
        if self.stage is None:
            split |= set(mesh.stage_axes)
        if not after_sync:
            split |= set(self.local_over)
        return tuple(axis for axis in mesh.shape if axis not in split)

    def global_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the global array.

        Args:
            local: The variable's own shape.
        """
        if self.slice is not None:
            return self.slice.shape
        return tuple(local) if self.flat is None else self.flat.array_shape

    def num_parts(self) -> int:
        """Into how many parts the global array is cut."""
        parts = (self.slice, self.flat)
        return math.prod(part.group.size for part in parts if part is not None)

    def shard_of_global(self, array):
        """What this rank holds of a global array, a NumPy array or a tensor."""
        if self.slice is not None:
            array = self.slice.slice_of(array)
        return array if self.flat is None else self.flat.local_shard(array)

    def all_gather(self, value, name: str = "shard"):
        """The global array; every rank of the parts calls this with what it holds."""
        if self.flat is not None:
            value = self.flat.all_gather(value, name)
        return value if self.slice is None else self.slice.all_gather(value, name)


_REPLICATED = VariableLayout()


def layout_of(variable) -> VariableLayout:
    """The layout of a Keras variable, or of an optimizer's."""
    return getattr(variable, _ATTRIBUTE, _REPLICATED)


def update_layout(variable, **changes: Any) -> VariableLayout:
    """Changes parts of a variable's layout; returns the new one."""
    layout = dataclasses.replace(layout_of(variable), **changes)
    setattr(variable, _ATTRIBUTE, layout)
    return layout


class _Next(threading.local):
    layout: VariableLayout | None = None


_next = _Next()


@contextlib.contextmanager
def of_the_next_variable(layout: VariableLayout) -> Iterator[None]:
    """Inside, variables that a layer makes begin with this layout.

    What is done to a variable as soon as it is made, as ZeRO-3 does, depends on its layout.
    """
    before, _next.layout = _next.layout, layout
    try:
        yield
    finally:
        _next.layout = before


def begin_layout(variable) -> VariableLayout:
    """Gives a variable that was just made the layout that was announced, if one was."""
    if _next.layout is not None:
        setattr(variable, _ATTRIBUTE, _next.layout)
    return layout_of(variable)


def global_shape(variable) -> tuple[int, ...]:
    """The shape of the global array that a variable is, or is a part of."""
    return layout_of(variable).global_shape(variable.shape)


def whole_value(variable, name: str = "shard"):
    """The global array that a variable is or is a part of; every rank calls this.

    Of a pipeline's `chain_model`, also those call it that do not hold the variable.

    Args:
        variable: A Keras variable.
        name: What the value serves, for messages.

    Returns:
        A tensor of the global shape.
    """
    checks.instance("variable", variable, keras.Variable, "a Keras variable")
    checks.text("name", name)
    layout = layout_of(variable)
    stage = layout.stage
    if stage is not None and not stage.is_here:
        whole = tf.zeros(global_shape(variable), stored_dtype(variable))
    else:
        value = stored_value(variable) if layout.flat is not None else variable.value
        whole = layout.all_gather(tf.convert_to_tensor(value), name)
    return whole if stage is None else broadcast(whole, stage.group, stage.holders[0], name=name)


def parameter_bytes(model: keras.Model) -> int:
    """The bytes of this rank's parameters, and so of their gradients, before ZeRO shares them out."""
    return sum(
        math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        for variable in model.trainable_variables
    )


def replicated_variables(
    model: keras.Model, *, after_sync: bool = False
) -> list[tuple[Any, tuple[str, ...]]]:
    """The variables of a model and its optimizer that several ranks hold alike.

    Flat shards are no two ranks' alike.

    Args:
        model: The model.
        after_sync: Whether variables count that ranks hold apart between two syncs.

    Returns:
        Each with the mesh axes along which it is the same.
    """
    strategy: DistributedStrategy | None = strategy_of(model)
    variables = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        variables += model.optimizer.variables
    return [
        (
            variable,
            ()
            if strategy is None
            else layout_of(variable).replicated_axes(strategy.mesh, after_sync=after_sync),
        )
        for variable in variables
        if layout_of(variable).flat is None and variable.dtype != "string"
    ]


def sum_over_parts(
    values: Sequence, variables: Sequence, shards: Sequence[FlatShard | None] | None = None
) -> list:
    """Sums scalars over the ranks that hold the other parts, with one collective a group.

    Args:
        values: A scalar tensor of each variable: this rank's part of a sum over its entries.
        variables: The variables.
        shards: The flat shards that the values are of; by default those that optimizers apply.

    Returns:
        The scalar tensors, each the sum over the variable's global array.
    """
    totals = list(values)
    layouts = [layout_of(variable) for variable in variables]
    shards = [layout.gradient_shard for layout in layouts] if shards is None else shards
    for part in ([layout.slice for layout in layouts], shards):
        groups = [None if each is None else each.group for each in part]
        for group in dict.fromkeys(group for group in groups if group is not None):
            places = [place for place, other in enumerate(groups) if other == group]
            packed = tf.stack([totals[place] for place in places])
            summed = tf.unstack(all_reduce(packed, group, name="norms"))
            for place, value in zip(places, summed, strict=True):
                totals[place] = value
    return totals
