"""Which variables lie on which ranks of the pipeline axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import Group, all_reduce, broadcast
from tfdist.keras_internals.attributes import stored_value
from tfdist.keras_internals.functional import without_values
from tfdist.keras_internals.variables import renew
from tfdist.pipeline.partition import Partition
from tfdist.sharding.layout import Stage, update_layout

__all__ = ["StagePlacement"]


class StagePlacement:
    """The variables of a partitioned chain, and the ranks that hold each.

    Args:
        partition: The partition.
        group: The pipeline axis.
    """

    def __init__(self, partition: Partition, group: Group):
        self.group = group
        self._variables: dict[int, keras.Variable] = {}
        self._ranks: dict[int, list[int]] = {}
        for stage in range(partition.num_stages):
            rank = stage % partition.num_ranks
            for link in partition.links(stage):
                for variable in link.variables:
                    self._variables[id(variable)] = variable
                    ranks = self._ranks.setdefault(id(variable), [])
                    if rank not in ranks:
                        ranks.append(rank)

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables of the chain, in its order; those of other ranks have no value."""
        return list(self._variables.values())

    @property
    def own(self) -> list[keras.Variable]:
        """Those of this rank."""
        return [v for key, v in self._variables.items() if self.group.rank in self._ranks[key]]

    def set_layouts(self) -> None:
        """Notes in the layouts of this rank's variables that they lie on a stage."""
        if self.group.size == 1:
            return
        for variable in self.own:
            first = self._ranks[id(variable)][0]
            update_layout(variable, stage=Stage(self.group, self.group.rank == first))

    def sum_tied(self, gradients: dict[int, Any]) -> None:
        """Adds up the gradients of variables that several ranks hold, in place.

        Args:
            gradients: By the id of this rank's variables.
        """
        for key, ranks in self._ranks.items():
            if len(ranks) == 1 or not self._variables[key].trainable:
                continue
            holds = self.group.rank in ranks
            if len(ranks) == 2 and not holds:
                continue
            group = self.group
            if len(ranks) == 2:
                (other,) = (self.group.ranks[r] for r in ranks if r != self.group.rank)
                group = self.group.engine.pair(other)
            variable = self._variables[key]
            gradient = gradients.get(key) if holds else None
            if gradient is None:
                gradient = tf.zeros(variable.shape, variable.dtype)
            # The rows of a sparse gradient do not say of how many; the other rank's tensor does.
            dense = tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
            total = all_reduce(dense, group, name=f"tied/{variable.name}")
            if holds:
                gradients[key] = total

    def fill(self) -> list[keras.Variable]:
        """Gives this rank the values of all variables; all ranks of the axis call it.

        Returns:
            Those that had none, for `empty`.
        """
        filled = []
        for key, variable in self._variables.items():
            root = self._ranks[key][0]
            lacks = self.group.rank not in self._ranks[key]
            if lacks:
                renew(variable, tf.zeros(variable.shape, variable.dtype))
                filled.append(variable)
            value = broadcast(
                tf.convert_to_tensor(variable.value), self.group, root, name="stage-variable"
            )
            if lacks:
                variable.assign(value)
        return filled

    @staticmethod
    def empty(variables: Sequence[keras.Variable]) -> None:
        """Takes the values away again."""
        for variable in variables:
            if not without_values(variable):
                stored_value.set(variable, None)
