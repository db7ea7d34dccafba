"""The dynamic loss scale: one rank's overflow is every rank's, and what it does is to be seen.

Keras' `LossScaleOptimizer` halves the scale when a gradient is not finite and skips that step, and
doubles it after `dynamic_growth_steps` good ones. It has a variable `iteration` that it saves and
never uses, as its `iterations` are those of the optimizer inside: skipped steps are counted there,
so files stay those of plain Keras.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.keras.patching import Patch
from tfdist.backend.keras.private import LossScaleOptimizer, TensorFlowTrainer
from tfdist.collectives import all_reduce
from tfdist.step.context import current_replica, strategy_of
from tfdist.step.local_steps import LocalSteps, group_in_step, local_optimizer
from tfdist.strategies.keras_patches.data import began_before


def loss_scale_logs(model) -> dict[str, tf.Tensor]:
    """What a training step adds to the logs: `loss_scale` and `skipped_steps`, or nothing."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, LossScaleOptimizer) or not optimizer.built:
        return {}
    return {
        "loss_scale": tf.convert_to_tensor(optimizer.dynamic_scale.value),
        "skipped_steps": tf.convert_to_tensor(optimizer._iterations.value),
    }


def _check_finite(self, grads, *, original):
    """A gradient that overflows on one rank skips the step on all."""
    finite = original(self, grads)
    replica = current_replica()
    if replica is None:
        return finite
    group, local = replica.strategy.group(), self.inner_optimizer
    if isinstance(local, LocalSteps):
        # Ranks that step apart leave steps out apart, and come to a sync together.
        local.begin_scaled_step()
        group = group_in_step(group, local.in_step(group.engine))
    finite = all_reduce(tf.cast(finite, tf.bool), group, "min", name="finite")
    skipped = tf.cast(tf.logical_not(finite), self._iterations.dtype)
    self._iterations.assign_add(skipped)
    return finite


def _metrics_or_logs(self, logs, *, original):
    """Keras takes the metrics' own results, unless a step returns something else than these."""
    more = loss_scale_logs(self)
    if not logs and began_before():
        # An earlier run did all of its batches, so no step of this one has returned any.
        return {**self.get_metrics_result(), **_of_all_ranks(self, more)}
    if not isinstance(logs, dict) or not more or not more.keys() <= logs.keys():
        return original(self, logs)
    rest = {name: value for name, value in logs.items() if name not in more}
    return {**original(self, rest), **_of_all_ranks(self, more)}


def _of_all_ranks(model, logs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Of ranks that step apart: the least of their scales, and the most steps that one left out."""
    strategy = strategy_of(model)
    if not logs or strategy is None or local_optimizer(model) is None:
        return logs
    least = tf.stack([logs["loss_scale"], -tf.cast(logs["skipped_steps"], tf.float32)])
    scale, skipped = tf.unstack(all_reduce(least, strategy.group(), "min", name="loss-scales"))
    return {"loss_scale": scale, "skipped_steps": tf.cast(-skipped, logs["skipped_steps"].dtype)}


PATCHES = (
    Patch(LossScaleOptimizer, "check_finite", ("self", "grads"), _check_finite),
    Patch(TensorFlowTrainer, "_get_metrics_result_or_logs", ("self", "logs"), _metrics_or_logs),
)
