"""Metrics: each rank counts its own samples; what is read is the count of all."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.patching import Patch
from tfdist.backend.keras.private import TensorFlowTrainer
from tfdist.step.context import current_step, strategy_of
from tfdist.step.keras_step import KerasStep
from tfdist.strategies.keras_patches.batch_losses import notice_scalar
from tfdist.strategies.keras_patches.counting import Counting, states_on_read
from tfdist.strategies.keras_patches.loss_scale import loss_scale_logs
from tfdist.strategies.keras_patches.metric_reads import keep_states


def _get_metrics_result(self, *, original):
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
    counting = Counting(self, strategy)
    variables = states_on_read(self.metrics)
    if counting.group.size == 1 or not variables:
        return original(self)
    if current_step() is None:
        states = counting.reduce(variables)
        keep_states(self.metrics, variables, states)
    else:
        states = tf.cond(
            strategy.extended.batch_logs_read,
            lambda: counting.reduce(variables),
            lambda: [tf.convert_to_tensor(variable.value) for variable in variables],
        )
    with keras.StatelessScope(state_mapping=list(zip(variables, states, strict=True))):
        return original(self)


def _update_mean(self, values, sample_weight=None, *, original):
    """A step's scalar, such as its loss, counts by the share of samples that it is the mean of.

    Summed over ranks the scalar then counts once a step, as in a single process. Keras counts a row
    by its mean over tokens, and so a rank's mean over those that it has counts by their number.
    """
    step = current_step()
    if step is not None:
        notice_scalar(values)
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
