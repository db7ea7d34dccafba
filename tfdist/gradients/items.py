"""Gradients with the group and the reduction of their variables."""

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
        gradient: A tensor or IndexedSlices, for this rank's part of the variable.
        variable: Its variable.
        layout: The layout of the variable.
        group: The ranks to reduce over.
        reduction: "sum" or "mean".
        keeps_rows: Whether the optimizer needs the rows of a sparse gradient, and not only their sum.
        is_global: Whether the training step has reduced it already.
        is_part: Whether a global gradient is the part that this rank applies.
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
        """Whether the variable's new value is passed in place of a gradient."""
        return bool(getattr(self.variable, "overwrite_with_gradient", False))

    @property
    def is_reduced(self) -> bool:
        """Whether the gradient is reduced already, as gradients of flat shards always are."""
        return self.is_global or self.layout.flat is not None

    def own_shard(self, whole):
        """The part of a whole reduced gradient for this rank's optimizer."""
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
    """The items for the gradients of a call of an optimizer.

    Args:
        gradients: Tensors, IndexedSlices or None.
        variables: Their variables.
        origins: Where they come from.
        replica: The replica context.
        keeps_rows: As in `GradientItem`.
    """
    strategy, mesh = replica.strategy, replica.strategy.mesh
    found = []
    for gradient, variable, origin in zip(gradients, variables, origins, strict=True):
        layout = layout_of(variable)
        group = group_in_step(strategy.group(*layout.gradient_axes(mesh)), replica.in_step)
        reduction = layout.reduction(mesh, replica.step)
        flags = keeps_rows, origin is not Origin.LOCAL, origin is Origin.PART
        found.append(GradientItem(gradient, variable, layout, group, reduction, *flags))
    return found
