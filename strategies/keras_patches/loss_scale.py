"""The dynamic loss scale: an overflow on one rank counts for all ranks, and is reported in the logs.

Keras' `LossScaleOptimizer` halves the scale and skips the step if a gradient is not finite, and doubles the
scale after `dynamic_growth_steps` finite steps. It saves a variable `iteration` that it never uses, because
its `iterations` are those of the optimizer inside. Skipped steps are counted in this variable, so that files
do not differ from those of Keras.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import LossScaleOptimizer, TensorFlowTrainer
from tfdist.collectives import all_reduce
from tfdist.step.context import current_replica, strategy_of
from tfdist.step.local_steps import LocalSteps, group_in_step, local_optimizer
from tfdist.strategies.keras_patches.data import began_before

PATCHES = Patches()


def loss_scale_logs(model) -> dict[str, tf.Tensor]:
    """The logs of a loss scale optimizer: `loss_scale` and `skipped_steps`; none without one."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, LossScaleOptimizer) or not optimizer.built:
        return {}
    return {
        "loss_scale": tf.convert_to_tensor(optimizer.dynamic_scale.value),
        "skipped_steps": tf.convert_to_tensor(optimizer._iterations.value),
    }


@PATCHES.of(LossScaleOptimizer, "check_finite")
def _check_finite(self, grads, *, original):
    """Makes all ranks skip the step if a gradient overflows on one."""
    finite = original(self, grads)
    replica = current_replica()
    if replica is None:
        return finite
    if replica.step is not None and not replica.step.is_even:
        # A rank without rows computes with one of zeros, whose gradients have no weight.
        finite = tf.logical_or(finite, tf.equal(replica.step.rows, 0))
    group, local = replica.strategy.group(), self.inner_optimizer
    if isinstance(local, LocalSteps):
        # Local steps are skipped separately, and the ranks synchronize at the same step.
        local.begin_scaled_step()
        group = group_in_step(group, local.in_step(group.engine))
    finite = all_reduce(tf.cast(finite, tf.bool), group, "min", name="finite")
    self._iterations.assign_add(tf.cast(tf.logical_not(finite), self._iterations.dtype))
    return finite


@PATCHES.of(TensorFlowTrainer, "_get_metrics_result_or_logs")
def _metrics_or_logs(self, logs, *, original):
    """Lets Keras report the results of the metrics, which it does unless a step returns other logs."""
    more = loss_scale_logs(self)
    if not logs and began_before():
        # An earlier run did all batches of the epoch, so no step of this run has returned logs.
        return {**self.get_metrics_result(), **_of_all_ranks(self, more)}
    if not isinstance(logs, dict) or not more or not more.keys() <= logs.keys():
        return original(self, logs)
    rest = {name: value for name, value in logs.items() if name not in more}
    return {**original(self, rest), **_of_all_ranks(self, more)}


def _of_all_ranks(model, logs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """With local steps: the smallest scale, and the largest number of skipped steps, of all ranks."""
    strategy = strategy_of(model)
    if not logs or strategy is None or local_optimizer(model) is None:
        return logs
    least = tf.stack([logs["loss_scale"], -tf.cast(logs["skipped_steps"], tf.float32)])
    scale, skipped = tf.unstack(all_reduce(least, strategy.group(), "min", name="loss-scales"))
    return {"loss_scale": scale, "skipped_steps": tf.cast(-skipped, logs["skipped_steps"].dtype)}
