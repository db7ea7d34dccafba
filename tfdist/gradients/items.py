"""Gradients with what is known of their variables: the group and the reduction of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdist.collectives import Group
from tfdist.gradients.origins import Origin
from tfdist.gradients.sparse import shard_of_gradient
from tfdist.sharding.layout import VariableLayout, layout_of
from tfdist.step.context import ReplicaContext
from tfdist.step.local_steps import group_in_step


@dataclasses.dataclass(frozen=True, eq=False)
class GradientItem:
    """A gradient on its path.

    Attributes:
        gradient: A tensor or IndexedSlices, of what this rank holds of the variable.
        variable: Its variable.
        layout: What of the variable this rank holds.
        group: The ranks that it is reduced over.
        reduction: How: "sum" or "mean".
        keeps_rows: Whether the optimizer needs the rows of a sparse gradient, and not only their sum.
        is_global: Whether the training step has reduced it already.
        is_part: Whether what it has then is the part that this rank applies.
    """

    gradient: Any
    variable: Any
    layout: VariableLayout
    group: Group
    reduction: str
    keeps_rows: bool = False
    is_global: bool = False
    is_part: bool = False

    @property
    def is_gradient(self) -> bool:
        """Whether there is a gradient, and not the new value of the variable in its place."""
        return self.gradient is not None and not self.overwrites

    @property
    def overwrites(self) -> bool:
        """Whether what stands for the gradient is the variable's new value."""
        return bool(getattr(self.variable, "overwrite_with_gradient", False))

    @property
    def is_reduced(self) -> bool:
        """Whether nothing is left to reduce; gradients of flat shards are reduced as they come."""
        return self.is_global or self.layout.flat is not None

    def own_shard(self, whole):
        """What this rank's optimizer is given of a whole reduced gradient of the variable."""
        is_part = self.is_part or self.layout.flat is not None
        return whole if is_part else shard_of_gradient(whole, self.layout.state)

    def with_gradient(self, gradient) -> GradientItem:
        """The item with another gradient."""
        return dataclasses.replace(self, gradient=gradient)


def items_of(
    gradients: Sequence,
    variables: Sequence,
    origins: Sequence[Origin],
    replica: ReplicaContext,
    keeps_rows: bool = False,
) -> list[GradientItem]:
    """The gradients of a call of an optimizer.

    Args:
        gradients: Tensors, IndexedSlices or None.
        variables: Their variables.
        origins: Where they come from.
        replica: The replica context.
        keeps_rows: As in `GradientItem`.
    """
    strategy, found = replica.strategy, []
    for gradient, variable, origin in zip(gradients, variables, origins, strict=True):
        layout = layout_of(variable)
        group = strategy.group(*layout.gradient_axes(strategy.mesh))
        how = layout.reduction(strategy.mesh, replica.step)
        found.append(
            GradientItem(
                gradient,
                variable,
                layout,
                group_in_step(group, replica.in_step),
                how,
                keeps_rows,
                origin is not Origin.LOCAL,
                origin is Origin.PART,
            )
        )
    return found


def by_reduction(items: Sequence[GradientItem]) -> dict[tuple[Group, str], list[int]]:
    """The places of the items that are reduced together."""
    places: dict[tuple[Group, str], list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault((item.group, item.reduction), []).append(place)
    return places
