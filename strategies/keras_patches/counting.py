"""The states of metrics over all ranks: each counts its own samples."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.backend.keras.attributes import loss_variables
from tfdist.collectives import Group, all_reduce, broadcast
from tfdist.layers.whole_batch import aggregation_of
from tfdist.step.context import DistributedStrategy, ModelRole, role_of


def states_on_read(metrics: Sequence) -> list:
    """The variables of metrics in which each rank counts."""
    return [
        variable
        for metric in metrics
        for variable in metric.variables
        if variable.synchronization == "on_read"
    ]


class Counting:
    """Which ranks count samples in metrics.

    Those that have other samples; in a pipeline the rank of the last stage does so for the others
    of its axis, which at most add to the reported loss.

    Args:
        model: The model of the metrics; None for metrics of no model.
        strategy: The strategy.

    Attributes:
        group: The ranks whose states are to be put together.
    """

    def __init__(self, model, strategy: DistributedStrategy):
        mesh, role = strategy.mesh, ModelRole() if model is None else role_of(model)
        self.group: Group = strategy.group(*mesh.gradient_axes, *role.axes)
        self._counts = role.sees_outputs
        self._counters = strategy.gradient_group.size
        self._loss = frozenset() if model is None else loss_variables(model)
        # One of the ranks that count, for states that cannot be added up.
        last = {axis: mesh.shape[axis] - 1 for axis in role.axes}
        one = mesh.rank_at(dict.fromkeys(mesh.gradient_axes, 0) | last)
        self._root = self.group.ranks.index(one)

    def reduce(self, variables, of: str | None = None) -> list[tf.Tensor]:
        """The variables' values over all ranks, in as few collectives as there are kinds of them.

        Args:
            variables: The variables.
            of: The name of their metric, for messages.
        """
        what = "metrics" if of is None else f"metrics/{of}"
        kinds: dict[tuple, list[int]] = {}
        for index, variable in enumerate(variables):
            kinds.setdefault((variable.dtype, aggregation_of(variable)), []).append(index)
        states: list = [None] * len(variables)
        for (dtype, aggregation), indices in kinds.items():
            some = [variables[index] for index in indices]
            values = [tf.convert_to_tensor(variable.value) for variable in some]
            flat = self._reduce_flat(some, values, aggregation, f"{what}/{aggregation}-{dtype}")
            parts = tf.split(flat, [value.shape.num_elements() for value in values])
            for index, part, value in zip(indices, parts, values, strict=True):
                states[index] = tf.reshape(part, value.shape)
        return states

    def _reduce_flat(self, variables, values, aggregation: str, name: str) -> tf.Tensor:
        adds = aggregation in ("sum", "mean")
        if adds and not self._counts:
            values = [
                value if id(variable) in self._loss else tf.zeros_like(value)
                for variable, value in zip(variables, values, strict=True)
            ]
        flat = tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)
        if aggregation in ("max", "min"):
            return all_reduce(flat, self.group, aggregation, name=name)
        if not adds:
            return broadcast(flat, self.group, self._root, name=name)
        flat = all_reduce(flat, self.group, "sum", name=name)
        if aggregation == "mean":
            flat = tf.cast(flat / tf.cast(self._counters, flat.dtype), flat.dtype)
        return flat
