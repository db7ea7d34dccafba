"""`VariableLayout`: the part of a global array that a variable holds on a rank of a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import stored_dtype, stored_value
from tfdist.collectives import Group, all_reduce, broadcast
from tfdist.mesh import Mesh
from tfdist.sharding.parts import FlatShard, NestedSlice, Slice
from tfdist.step.local_steps import held_optimizers
from tfdist.utils import checks
from tfdist.utils.places import places_by, replace_at
from tfdist.utils.temporary import attributes_set

_ATTRIBUTE = "_tfdist_layout"


@dataclasses.dataclass(frozen=True)
class Stage:
    """The pipeline stage of a variable.

    Attributes:
        group: The ranks of the pipeline.
        holders: The places in the group of the ranks that hold the variable; several for a tied weight.
    """

    group: Group
    holders: tuple[int, ...]

    @property
    def is_here(self) -> bool:
        """Whether this rank holds the variable."""
        return self.group.rank in self.holders

    @property
    def counts(self) -> bool:
        """Whether sums over all variables count this rank's copy."""
        return self.group.rank == self.holders[0]


@dataclasses.dataclass(frozen=True)
class VariableLayout:
    """The part of a global array that a rank's variable holds.

    A variable without a layout is replicated: all ranks hold the same value, and its gradient is summed over
    all ranks with different rows or tokens.

    Attributes:
        slice: The slice of the array along one dim, as in tensor parallelism, or two. None: all dims are
            whole.
        flat: The flat shard of the array, or of its slice (ZeRO-3, and optimizer state under ZeRO). None:
            the value has the dims of the array.
        state: For a replicated parameter, the flat shard whose optimizer state is on this rank (ZeRO 1
            and 2).
        stage: The pipeline stage of the variable.
        partial_over: The ranks, in addition to those of `gradient_axes`, over which the gradient is summed,
            because each computes a part of it. For example, the weights of a normalization that runs on a
            slice of the sequence.
        local_over: The mesh axes along which values differ between two synchronizations of a `LocalSteps`
            optimizer: those of parameters, and of the state of the optimizer inside.
        same_on_all_ranks: For a state that its layer updates, whether every rank computes the same value
            from the rows of all ranks.
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
        """Whether a rank applies only a part of the gradient."""
        return any(part is not None for part in (self.slice, self.flat, self.state, self.stage))

    @property
    def gradient_shard(self) -> FlatShard | None:
        """The flat shard of the gradient that the optimizer applies."""
        return self.flat or self.state

    @property
    def counts(self) -> bool:
        """Whether sums over the variables of all stages count this rank's copy."""
        return self.stage is None or self.stage.counts

    def gradient_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The mesh axes over which the gradient is summed, without those that split the variable."""
        split = () if self.slice is None else self.slice.group.axes
        return tuple(axis for axis in mesh.gradient_axes if axis not in split)

    def has_global_gradient(self, mesh: Mesh) -> bool:
        """Whether a rank's gradient is of the global loss, and not of its loss: see `tfdist.step.keras_step`.

        If ranks that split a variable have different rows or tokens, each computes for the others.
        """
        return self.gradient_axes(mesh) != tuple(mesh.gradient_axes)

    def reduction(self, mesh: Mesh, step: Any) -> str:
        """The reduction over the ranks of `gradient_axes` that gives the gradient of the step.

        Args:
            mesh: The mesh.
            step: The current Keras step; None outside of one.
        """
        return "sum" if step is None or self.has_global_gradient(mesh) else "mean"

    def replicated_axes(self, mesh: Mesh, *, after_sync: bool = False) -> tuple[str, ...]:
        """The mesh axes along which all ranks hold the same part.

        Args:
            mesh: The mesh.
            after_sync: Whether to include those of `local_over`.
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
            local: The shape of the variable.
        """
        if self.slice is not None:
            return self.slice.shape
        return tuple(local) if self.flat is None else self.flat.array_shape

    def shard_of_global(self, array):
        """This rank's part of a global array, which is a NumPy array or a tensor."""
        if self.slice is not None:
            array = self.slice.slice_of(array)
        return array if self.flat is None else self.flat.local_shard(array)

    def all_gather(self, value, name: str = "shard"):
        """Gathers the global array; every rank with a part must call this."""
        if self.flat is not None:
            value = self.flat.all_gather(value, name)
        return value if self.slice is None else self.slice.all_gather(value, name)


_REPLICATED = VariableLayout()


def layout_of(variable) -> VariableLayout:
    """The layout of a variable of Keras or of an optimizer."""
    return getattr(variable, _ATTRIBUTE, _REPLICATED)


def update_layout(variable, **changes: Any) -> VariableLayout:
    """Changes attributes of a variable's layout, and returns the new layout."""
    layout = dataclasses.replace(layout_of(variable), **changes)
    setattr(variable, _ATTRIBUTE, layout)
    return layout


class _Next(threading.local):
    layout: VariableLayout | None = None


_next = _Next()


def of_the_next_variable(
    layout: VariableLayout | None,
) -> contextlib.AbstractContextManager[None]:
    """A context in which new variables of a layer have this layout; None for no layout.

    ZeRO-3 shards a variable when it is created, depending on its layout.
    """
    return attributes_set(_next, layout=layout)


def begin_layout(variable) -> VariableLayout:
    """Applies the layout of `of_the_next_variable` to a new variable, and returns its layout."""
    if _next.layout is not None:
        setattr(variable, _ATTRIBUTE, _next.layout)
    return layout_of(variable)


def global_shape(variable) -> tuple[int, ...]:
    """The shape of the global array of a variable."""
    return layout_of(variable).global_shape(variable.shape)


def whole_value(variable, name: str = "shard"):
    """The global array of a variable; all ranks must call this.

    This includes ranks of a pipeline that do not hold the variable, with the variable of the `chain_model`.

    Args:
        variable: A Keras variable.
        name: The name of the collectives, for messages.

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
    """The bytes of this rank's parameters, and so of their gradients, without ZeRO."""
    return sum(
        math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        for variable in model.trainable_variables
    )


def replicated_variables(
    model: keras.Model, *, after_sync: bool = False
) -> list[tuple[Any, tuple[str, ...]]]:
    """The variables of a model and its optimizer that are replicated, which excludes flat shards.

    Args:
        model: The model, under a strategy of tfdist.
        after_sync: Whether to include axes along which values differ between two synchronizations.

    Returns:
        Each variable, with the mesh axes along which it is replicated.
    """
    mesh = model.distribute_strategy.mesh
    return [
        (variable, layout_of(variable).replicated_axes(mesh, after_sync=after_sync))
        for variable in variables_of(model)
        if layout_of(variable).flat is None and variable.dtype != "string"
    ]


def variables_of(model) -> list:
    """The variables of a model and its optimizers, each once; none for other objects."""
    optimizers = held_optimizers(model).values() if hasattr(model, "variables") else ()
    found = [v for each in (model, *optimizers) for v in getattr(each, "variables", ())]
    return list({id(variable): variable for variable in found}.values())


def sum_over_parts(
    values: Sequence, variables: Sequence, shards: Sequence[FlatShard | None] | None = None
) -> list:
    """Sums scalars over the ranks with the other parts of each variable, in one collective per group.

    Args:
        values: A scalar tensor for each variable: this rank's part of a sum over its entries.
        variables: The variables.
        shards: The flat shards of the values; by default those that optimizers apply.

    Returns:
        The scalar tensors, each the sum over the variable's global array.
    """
    totals = list(values)
    layouts = [layout_of(variable) for variable in variables]
    shards = [layout.gradient_shard for layout in layouts] if shards is None else shards
    for part in ([layout.slice for layout in layouts], shards):
        groups = [None if each is None else each.group for each in part]
        for group, places in places_by(groups).items():
            packed = tf.stack([totals[place] for place in places])
            summed = all_reduce(packed, group, name="norms")
            replace_at(totals, places, tf.unstack(summed))
    return totals
