"""The split of the weights of experts: experts over one axis, the hidden units of each over another."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.collectives import Group
from tfdist.sharding.parts import NestedSlice, Slice
from tfdist.sharding.weights import TENSOR_AXIS, axis_group, tensor_group
from tfdist.step.context import current_strategy

#: The axis whose ranks hold different experts, and different rows.
EXPERT_AXIS = "expert"


def expert_group() -> Group | None:
    """The ranks along the expert axis of the strategy in scope; None if there is one rank."""
    return axis_group(EXPERT_AXIS)


def check_experts(num_experts: int, group: Group | None, layer) -> None:
    """Checks that the experts of a layer can be divided among ranks.

    Raises:
        ValueError: Their number is not divisible by the size of the expert axis.
    """
    if group is not None and num_experts % group.size:
        raise ValueError(
            f"num_experts must be divisible by the size of the {EXPERT_AXIS} axis. Received: "
            f"num_experts={num_experts} in `{layer.name}` with {EXPERT_AXIS}={group.size}."
        )


def expert_part(shape: Sequence[int], unit_dim: int | None) -> Slice | NestedSlice | None:
    """The part of an array of all experts' weights on this rank, under the strategy in scope.

    Args:
        shape: The shape of the global array, with the experts along dim 0.
        unit_dim: The dim of the hidden units, split over the tensor axis; None if there is none.

    Returns:
        The part; None if a rank holds the whole array.
    """
    shape = tuple(shape)
    strategy, experts, units = current_strategy(), expert_group(), tensor_group()
    outer = None if experts is None else Slice(experts, 0, shape)
    if units is None or unit_dim is None or strategy is None:
        return outer
    if outer is None:
        return Slice(units, unit_dim, shape)
    inner = Slice(units, unit_dim, outer.local_shape)
    return NestedSlice(outer, inner, strategy.group(EXPERT_AXIS, TENSOR_AXIS))
