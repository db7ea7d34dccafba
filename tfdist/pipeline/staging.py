"""Which variables lie on which ranks of the pipeline axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import Group, all_reduce, broadcast
from tfdist.pipeline.keras_graph import without_values
from tfdist.pipeline.partition import Partition

__all__ = ["Placement", "Staging", "mark_staged", "staging_of"]

_MARK = "_tfdist_staging"


@dataclasses.dataclass(frozen=True)
class Staging:
    """That a variable belongs to a stage of a pipeline.

    Attributes:
        group: The pipeline axis.
        counts: Whether this rank's copy is the one that sums over all variables count: a tied
            weight lies on several ranks.
    """

    group: Group
    counts: bool


def staging_of(variable) -> Staging | None:
    """The mark of a variable of a pipeline's stage, or of an optimizer's slot for one."""
    return getattr(variable, _MARK, None)


def mark_staged(variable, staging: Staging) -> None:
    """Says that a variable belongs to a stage."""
    setattr(variable, _MARK, staging)


class Placement:
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

    def mark(self) -> None:
        """Marks this rank's variables, where there are other ranks."""
        if self.group.size == 1:
            return
        for variable in self.own:
            first = self._ranks[id(variable)][0]
            mark_staged(variable, Staging(self.group, self.group.rank == first))

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
                with tf.init_scope():
                    variable._initialize(tf.zeros(variable.shape, variable.dtype))
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
                variable._value = None
