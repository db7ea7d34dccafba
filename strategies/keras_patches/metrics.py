"""Metrics: each rank counts its own samples, and results are those of all ranks."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import TensorFlowTrainer
from tfdist.step.context import current_step, strategy_of
from tfdist.step.keras_step import KerasStep
from tfdist.strategies.keras_patches.batch_losses import warn_of_scalar
from tfdist.strategies.keras_patches.counting import Counting, states_on_read
from tfdist.strategies.keras_patches.loss_scale import loss_scale_logs
from tfdist.strategies.keras_patches.metric_reads import keep_states

PATCHES = Patches()


@PATCHES.of(TensorFlowTrainer, "get_metrics_result")
def _get_metrics_result(self, *, original):
    """The metrics of all ranks; in a training step also the logs of a loss scale."""
    results = _global_metrics(original, self)
    step = current_step()
    if step is not None and step.kind == "train" and isinstance(results, dict):
        results |= loss_scale_logs(self)
    if step is not None:
        step.results = results, functools.partial(_global_metrics, original, self, always=True)
    return results


def _global_metrics(original, self, *, always: bool = False):
    """Computes the results of metrics from the states of all ranks.

    This is always the case at the end of an epoch. The logs of a single batch are reduced only if a callback
    reads them (`batch_logs_read`), or `always`.
    """
    strategy: Any = strategy_of(self)
    if strategy is None:
        return original(self)
    counting = Counting(self, strategy)
    variables = states_on_read(self.metrics)
    if counting.group.size == 1 or not variables:
        return original(self)
    if current_step() is None:
        states = counting.reduce(variables)
        keep_states(self.metrics, variables, states)
    elif always:
        states = counting.reduce(variables)
    else:
        states = tf.cond(
            strategy.extended.batch_logs_read,
            lambda: counting.reduce(variables),
            lambda: [tf.convert_to_tensor(variable.value) for variable in variables],
        )
    with keras.StatelessScope(state_mapping=list(zip(variables, states, strict=True))):
        return original(self)


@PATCHES.of(keras.metrics.Mean, "update_state")
def _update_mean(self, values, sample_weight=None, *, original):
    """Weights a scalar of a step, such as its loss, by the rank's share of the samples.

    Over all ranks the scalar then counts once per step, as in a single process. Keras counts the mean over the
    tokens of a row, so the mean over the tokens of a rank is weighted by their number.
    """
    step = current_step()
    if step is not None:
        warn_of_scalar(values)
    if step is None or step.is_even:
        return original(self, values, sample_weight)
    is_scalar = (
        len(values.shape) == 0 if hasattr(values, "shape") else not tf.nest.is_nested(values)
    )
    if is_scalar and sample_weight is None:
        values = tf.convert_to_tensor(values)
        # Local steps have no collective in each step: values are weighted by rows, and not by steps.
        sample_weight = step.rows if step.is_local else step.share * step.group.size
        values = tf.where(step.rows > 0, values, tf.zeros_like(values))
    elif step.tokens is not None:
        values, sample_weight = _by_tokens(values, sample_weight, step)
    return original(self, values, sample_weight)


def _by_tokens(values, sample_weight, step: KerasStep):
    """Values of rows or tokens, with weights that give the mean over all ranks."""
    values = tf.convert_to_tensor(values)
    rank = len(values.shape)
    # In a vector with an entry for each token all entries have the same weight.
    is_of_rows = rank == 0 or tf.equal(tf.shape(values)[0], step.rows)
    factor = tf.where(is_of_rows, step.tokens_to_mean, 1.0)
    if sample_weight is None:
        # Without weights Keras ignores a mask; the copy has none.
        values = tf.identity(values)
        return values, tf.fill(tf.shape(values)[:1], factor)
    return values, tf.cast(sample_weight, tf.float32) * factor
