"""Metrics: each rank counts its own samples; what is read is the count of all."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import Group, all_reduce, broadcast
from tfdist.context import current_step, role_of, strategy_of
from tfdist.keras_internals.attributes import loss_variables
from tfdist.keras_internals.patching import Patch
from tfdist.keras_internals.private import TensorFlowTrainer, in_stateless_scope
from tfdist.keras_step import KerasStep
from tfdist.strategies.keras_patches.loss_scale import loss_scale_logs

__all__ = ["PATCHES", "global_results"]


def _get_metrics_result(original, self):
    """The metrics of all ranks; in a training step also what a loss scale did."""
    results = _global_metrics(original, self)
    step = current_step()
    if step is not None and step.kind == "train" and isinstance(results, dict):
        results |= loss_scale_logs(self)
    return results


def _global_metrics(original, self):
    """Evaluates the metrics on the states of all ranks together.

    At the end of an epoch this is always so. The logs of a single batch are reduced only while
    some callback reads them (`batch_logs_read`), so that training pays for what is looked at.
    """
    strategy: Any = strategy_of(self)
    if strategy is None:
        return original(self)
    counting = _Counting(self, strategy)
    if counting.group.size == 1:
        return original(self)
    variables = [
        variable
        for metric in self.metrics
        for variable in metric.variables
        if variable.synchronization == "on_read"
    ]
    if not variables:
        return original(self)
    if current_step() is None:
        states = counting.reduce(variables)
    else:
        states = tf.cond(
            strategy.extended.batch_logs_read,
            lambda: counting.reduce(variables),
            lambda: [tf.convert_to_tensor(variable.value) for variable in variables],
        )
    with keras.StatelessScope(state_mapping=list(zip(variables, states, strict=True))):
        return original(self)


@contextlib.contextmanager
def global_results(model, strategy) -> Iterator[None]:
    """Inside, `metric.result()` of the model's metrics is that of all ranks' samples.

    For a custom `train_step` or `test_step`, which may return the results of its metrics one by
    one, under names that `get_metrics_result` does not know.
    """
    counting = _Counting(model, strategy)
    metrics = [metric for metric in model.metrics if metric.variables]
    for metric in metrics:
        metric.result = functools.partial(_global_result, metric, metric.result, counting)
    try:
        yield
    finally:
        for metric in metrics:
            del metric.result


def _global_result(metric, result, counting: _Counting):
    if in_stateless_scope():
        return result()  # `get_metrics_result` has put the global states in place.
    variables = [variable for variable in metric.variables if variable.synchronization == "on_read"]
    states = counting.reduce(variables)
    with keras.StatelessScope(state_mapping=list(zip(variables, states, strict=True))):
        return result()


class _Counting:
    """Which ranks count samples in a model's metrics.

    Those that have other samples; in a pipeline the rank of the last stage does so for the others
    of its axis, which at most add to the reported loss.

    Attributes:
        group: The ranks whose states are to be put together.
    """

    def __init__(self, model, strategy):
        mesh, role = strategy.mesh, role_of(model)
        self.group: Group = strategy.group(*mesh.gradient_axes, *role.axes)
        self._counts = role.sees_outputs
        self._counters = strategy.gradient_group.size
        self._loss = loss_variables(model)
        # One of the ranks that count, for states that cannot be added up.
        last = {axis: mesh.shape[axis] - 1 for axis in role.axes}
        one = mesh.rank_at(dict.fromkeys(mesh.gradient_axes, 0) | last)
        self._root = self.group.ranks.index(one)

    def reduce(self, variables) -> list[tf.Tensor]:
        """The variables' values over all ranks, in as few collectives as there are kinds of them."""
        kinds: dict[tuple, list[int]] = {}
        for index, variable in enumerate(variables):
            kinds.setdefault((variable.dtype, variable.aggregation), []).append(index)
        states: list = [None] * len(variables)
        for (dtype, aggregation), indices in kinds.items():
            some = [variables[index] for index in indices]
            values = [tf.convert_to_tensor(variable.value) for variable in some]
            flat = self._reduce_flat(some, values, aggregation, f"metrics/{aggregation}-{dtype}")
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
        if not adds:
            return broadcast(flat, self.group, self._root, name=name)
        flat = all_reduce(flat, self.group, "sum", name=name)
        if aggregation == "mean":
            flat = tf.cast(flat / tf.cast(self._counters, flat.dtype), flat.dtype)
        return flat


def _update_mean(original, self, values, sample_weight=None):
    """A step's scalar, such as its loss, counts by the share of samples that it is the mean of.

    Summed over ranks the scalar then counts once a step, as in a single process. Keras counts a row
    by its mean over tokens, and so a rank's mean over those that it has counts by their number.
    """
    step = current_step()
    if step is None or step.is_even:
        return original(self, values, sample_weight)
    is_scalar = (
        len(values.shape) == 0 if hasattr(values, "shape") else not tf.nest.is_nested(values)
    )
    if is_scalar and sample_weight is None:
        values = tf.convert_to_tensor(values)
        # Ranks that step apart ask no other one in every step: there rows count, and not steps.
        sample_weight = step.rows if step.is_local else step.share * step.group.size
        values = tf.where(step.rows > 0, values, tf.zeros_like(values))
    elif step.tokens is not None:
        values, sample_weight = _by_tokens(values, sample_weight, step)
    return original(self, values, sample_weight)


def _by_tokens(values, sample_weight, step: KerasStep):
    """Values of rows or of their tokens, and weights by which they count as the mean over all ranks."""
    values = tf.convert_to_tensor(values)
    rank = len(values.shape)
    # A vector with an entry for each token counts each as one.
    is_of_rows = rank == 0 or tf.equal(tf.shape(values)[0], step.rows)
    factor = tf.where(is_of_rows, step.tokens_to_mean, 1.0)
    if sample_weight is None:
        # Without weights Keras takes no heed of a mask, which the copy does not have.
        values = tf.identity(values)
        return values, tf.fill(tf.shape(values)[:1], factor)
    return values, tf.cast(sample_weight, tf.float32) * factor


PATCHES = (
    Patch(TensorFlowTrainer, "get_metrics_result", ("self",), _get_metrics_result),
    Patch(keras.metrics.Mean, "update_state", ("self", "values", "sample_weight"), _update_mean),
)
