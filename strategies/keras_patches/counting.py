"""The states of metrics over all ranks, each of which counts its own samples."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.backend.keras.attributes import loss_variables
from tfdist.collectives import Group, all_reduce, broadcast
from tfdist.layers.whole_batch import aggregation_of
from tfdist.sharding.parts import flattened, unflattened
from tfdist.step.context import DistributedStrategy, ModelRole, role_of
from tfdist.utils.places import replaced_by_key


def states_on_read(metrics: Sequence) -> list:
    """The variables of metrics in which each rank counts separately."""
    return [
        variable
        for metric in metrics
        for variable in metric.variables
        if variable.synchronization == "on_read"
    ]


class Counting:
    """The ranks that count samples in metrics, and the reduction of their states.

    Ranks with different samples count. In a pipeline the rank of the last stage counts for the others of its
    axis, which may only add to the reported loss.

    Args:
        model: The model of the metrics; None for metrics without a model.
        strategy: The strategy.

    Attributes:
        group: The ranks whose states are reduced.
    """

    def __init__(self, model, strategy: DistributedStrategy):
        mesh, role = strategy.mesh, ModelRole() if model is None else role_of(model)
        self.group: Group = strategy.group(*mesh.gradient_axes, *role.axes)
        self._counts = role.sees_outputs
        self._counters = strategy.gradient_group.size
        self._loss = frozenset() if model is None else loss_variables(model)
        # One of the ranks that count, whose states are broadcast if they cannot be added up.
        last = {axis: mesh.shape[axis] - 1 for axis in role.axes}
        one = mesh.rank_at(dict.fromkeys(mesh.gradient_axes, 0) | last)
        self._root = self.group.ranks.index(one)

    def reduce(self, variables, of: str | None = None) -> list[tf.Tensor]:
        """The values of variables over all ranks, with one collective for each dtype and aggregation.

        Args:
            variables: The variables.
            of: The name of their metric, for messages.
        """
        name = "metrics" if of is None else f"metrics/{of}"

        def reduced(kind: tuple[str, str], places: list[int]) -> list[tf.Tensor]:
            dtype, aggregation = kind
            some = [variables[place] for place in places]
            values = [tf.convert_to_tensor(variable.value) for variable in some]
            flat = self._reduce_flat(some, values, aggregation, f"{name}/{aggregation}-{dtype}")
            return unflattened(flat, values)

        kinds = [(variable.dtype, aggregation_of(variable)) for variable in variables]
        return replaced_by_key(variables, kinds, reduced)

    def _reduce_flat(self, variables, values, aggregation: str, name: str) -> tf.Tensor:
        adds = aggregation in ("sum", "mean")
        if adds and not self._counts:
            values = [
                value if id(variable) in self._loss else tf.zeros_like(value)
                for variable, value in zip(variables, values, strict=True)
            ]
        flat = flattened(values)
        if aggregation in ("max", "min"):
            return all_reduce(flat, self.group, aggregation, name=name)
        if not adds:
            return broadcast(flat, self.group, self._root, name=name)
        flat = all_reduce(flat, self.group, "sum", name=name)
        if aggregation == "mean":
            flat = tf.cast(flat / tf.cast(self._counters, flat.dtype), flat.dtype)
        return flat
