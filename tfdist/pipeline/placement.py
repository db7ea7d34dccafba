"""The ranks of the pipeline axis that hold each variable."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.functional import defer, initialize_weights, is_deferred
from tfdist.collectives import Group, all_reduce
from tfdist.pipeline.partition import Partition
from tfdist.sharding.layout import Stage, update_layout
from tfdist.sharding.parts import SlicedInitializer


class StagePlacement:
    """The variables of a partitioned chain, and the ranks that hold each.

    Args:
        partition: The partition.
        group: The pipeline axis.
    """

    def __init__(self, partition: Partition, group: Group):
        self.group, self._partition = group, partition
        self.renew()

    def renew(self) -> None:
        """Updates the variables, which change if layers get LoRA adapters, and places them."""
        self._variables: dict[int, keras.Variable] = {}
        self._ranks: dict[int, list[int]] = {}
        for stage in range(self._partition.num_stages):
            rank = stage % self._partition.num_ranks
            for segment in self._partition.segments(stage):
                for variable in segment.variables:
                    self._variables[id(variable)] = variable
                    ranks = self._ranks.setdefault(id(variable), [])
                    if rank not in ranks:
                        ranks.append(rank)
        initialize_weights(self.own)
        if self.group.size == 1:
            return
        zeros = keras.initializers.Zeros()
        for key, variable in self._variables.items():
            part = update_layout(variable, stage=Stage(self.group, tuple(self._ranks[key]))).slice
            if self.group.rank not in self._ranks[key] and is_deferred(variable):
                # A trace for shapes must not read such a variable from a file, or draw its values.
                defer(variable, zeros if part is None else SlicedInitializer(zeros, part))

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables of the chain, in its order; those of other ranks have no values."""
        return list(self._variables.values())

    @property
    def own(self) -> list[keras.Variable]:
        """The variables that this rank holds."""
        return [v for key, v in self._variables.items() if self.group.rank in self._ranks[key]]

    def sum_tied(self, gradients: dict[int, Any]) -> None:
        """Sums the gradients of variables that several ranks hold, in place.

        Args:
            gradients: The gradients of this rank's variables, by the variables' ids.
        """
        for key, ranks in self._ranks.items():
            variable, group = self._variables[key], self.group
            holds = group.rank in ranks
            if len(ranks) == 1 or not variable.trainable or (len(ranks) == 2 and not holds):
                continue
            if len(ranks) == 2:
                (other,) = (group.ranks[rank] for rank in ranks if rank != group.rank)
                group = group.engine.pair(other)
            gradient = gradients.get(key) if holds else None
            if gradient is None:
                gradient = tf.zeros(variable.shape, variable.dtype)
            # A sparse gradient does not define the number of rows; the other rank's tensor does.
            dense = tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
            total = all_reduce(dense, group, name=f"tied/{variable.name}")
            if holds:
                gradients[key] = total
