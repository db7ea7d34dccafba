"""The ranks of the pipeline axis that hold each variable."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.functional import defer, initialize_weights, is_deferred
from tfdist.backend.keras.private import all_layers
from tfdist.collectives import Group, all_gather, all_reduce
from tfdist.pipeline.partition import Partition
from tfdist.sharding.layout import Stage, update_layout
from tfdist.sharding.parts import SlicedInitializer
from tfdist.sharding.states import layer_states

#: By variable's id and stage the number of a gradient's components, and whether its indices depend on no batch.
Forms = dict[int, dict[int, tuple[int, bool]]]


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
        #: The ranks of the pipeline axis that hold each variable, by its id.
        self.ranks: dict[int, list[int]] = {}
        for stage in range(self._partition.num_stages):
            rank = stage % self._partition.num_ranks
            for segment in self._partition.segments(stage):
                for variable in segment.variables:
                    self._variables[id(variable)] = variable
                    ranks = self.ranks.setdefault(id(variable), [])
                    if rank not in ranks:
                        ranks.append(rank)
        initialize_weights(self.own)
        if self.group.size == 1:
            return
        zeros = keras.initializers.Zeros()
        for key, variable in self._variables.items():
            part = update_layout(variable, stage=Stage(self.group, tuple(self.ranks[key]))).slice
            if self.group.rank not in self.ranks[key] and is_deferred(variable):
                # A trace for shapes must not read such a variable from a file, or draw its values.
                defer(variable, zeros if part is None else SlicedInitializer(zeros, part))

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables of the chain, in its order; those of other ranks have no values."""
        return list(self._variables.values())

    @property
    def own(self) -> list[keras.Variable]:
        """The variables that this rank holds."""
        return [v for key, v in self._variables.items() if self.group.rank in self.ranks[key]]

    def sum_tied(self, gradients: dict[int, Any], forms: Forms) -> None:
        """Sums the gradients of variables that several ranks hold, in place.

        Args:
            gradients: The gradients of this rank's variables, by the variables' ids.
            forms: The form of each gradient of all ranks.
        """
        for key, ranks in self.ranks.items():
            variable, group = self._variables[key], self.group
            holds = group.rank in ranks
            if len(ranks) == 1 or key not in forms or (len(ranks) == 2 and not holds):
                continue
            if len(ranks) == 2:
                (other,) = (group.ranks[rank] for rank in ranks if rank != group.rank)
                group = group.engine.pair(other)
            shape, name = variable.shape, f"tied/{variable.name}"
            if min(forms[key].values())[0] > 1:
                # As in one process, optimizers get a row for each lookup, also for ids in several stages.
                none = tf.IndexedSlices(tf.zeros([0, *shape[1:]], variable.dtype), tf.zeros([0]))
                rows = gradients.get(key, none)
                values = all_gather(rows.values, group, uneven=True, name=f"{name}/rows")
                indices = tf.cast(rows.indices, tf.int64)
                indices = all_gather(indices, group, uneven=True, name=f"{name}/indices")
                total = tf.IndexedSlices(values, indices, tf.constant([*shape], tf.int64))
            else:
                # A sum of rows does not define its shape; the other rank's tensor does.
                dense = gradients.get(key, tf.zeros(shape, variable.dtype))
                total = all_reduce(tf.ensure_shape(dense, shape), group, name=name)
            if holds:
                gradients[key] = total

    def check_states(self, model: keras.Model) -> None:
        """Raises ValueError if several ranks hold a state that a layer updates, such as a moving average.

        Those of float8 are refused on one rank too: Keras assigns them, instead of gradients, for each micro-batch.
        """
        if any(getattr(variable, "overwrite_with_gradient", False) for variable in model.variables):
            raise ValueError(
                "A pipeline cannot train layers in float8, whose scales are those of a whole batch. Received: "
                f"`{model.name}`. Use another policy, or another axis of the mesh."
            )
        constant = {
            id(v) for layer in all_layers(model) if _is_constant(layer) for v in layer.variables
        }
        states = [state for state in layer_states(model) if id(state) not in constant]
        shared = [v.path for v in states if len(self.ranks.get(id(v), ())) > 1]
        if shared:
            raise ValueError(
                "A layer with a state cannot be in stages of several ranks, each of which would update its "
                f"own. Received: {shared} in `{model.name}`. Use a layer for each call, or `cut` the chain "
                "elsewhere."
            )


def _is_constant(layer) -> bool:
    """Whether a layer of Keras does not update its states."""
    if isinstance(layer, keras.layers.BatchNormalization):
        return not layer.trainable
    return isinstance(layer, keras.layers.Normalization) or layer.quantization_mode is not None
