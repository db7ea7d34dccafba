"""Which variables lie on which ranks of the pipeline axis."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.functional import defer, initialize_weights, without_values
from tfdist.collectives import Group, all_reduce
from tfdist.pipeline.partition import Partition
from tfdist.sharding.initializers import SlicedInitializer
from tfdist.sharding.layout import Stage, update_layout


class StagePlacement:
    """The variables of a partitioned chain, and the ranks that hold each.

    Args:
        partition: The partition.
        group: The pipeline axis.
    """

    def __init__(self, partition: Partition, group: Group):
        self.group, self._partition = group, partition
        self._variables: dict[int, keras.Variable] = {}
        self._ranks: dict[int, list[int]] = {}
        self.renew()

    def renew(self) -> None:
        """Looks again which variables there are, as layers get more by LoRA, and places them."""
        self._variables, self._ranks = {}, {}
        for stage in range(self._partition.num_stages):
            rank = stage % self._partition.num_ranks
            for link in self._partition.links(stage):
                for variable in link.variables:
                    self._variables[id(variable)] = variable
                    ranks = self._ranks.setdefault(id(variable), [])
                    if rank not in ranks:
                        ranks.append(rank)
        initialize_weights(self.own)
        if self.group.size == 1:
            return
        for key, variable in self._variables.items():
            layout = update_layout(variable, stage=Stage(self.group, tuple(self._ranks[key])))
            if self.group.rank not in self._ranks[key] and without_values(variable):
                # Where a layer is traced for shapes, none is to be read from a file or drawn.
                zeros = keras.initializers.Zeros()
                defer(
                    variable,
                    zeros if layout.slice is None else SlicedInitializer(zeros, layout.slice),
                )

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables of the chain, in its order; those of other ranks have no value."""
        return list(self._variables.values())

    @property
    def own(self) -> list[keras.Variable]:
        """Those of this rank."""
        return [v for key, v in self._variables.items() if self.group.rank in self._ranks[key]]

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
