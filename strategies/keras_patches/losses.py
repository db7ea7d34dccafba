"""Losses: in a Keras step a loss is computed from this rank's rows, as if they were the batch.

Keras divides losses by the number of replicas, and multiplies by it when it reports them. That is exact only
for equal shares and for losses that Keras averages: a custom `train_step` that reports its loss would be
wrong by this factor. tfdist weights gradients instead (see `tfdist.step.keras_step.KerasStep`), and converts
losses that are not a mean over samples.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import loss_module
from tfdist.step.context import current_step, role_of
from tfdist.step.keras_step import KerasStep
from tfdist.strategies.keras_patches.batch_losses import of_whole_batch, warn_of_scalar

PATCHES = Patches()


@PATCHES.of(loss_module, "scale_loss_for_distribution")
@PATCHES.of(loss_module, "unscale_loss_for_distribution")
def _scale(value, *, original):
    return original(value) if current_step() is None else value


@PATCHES.of(loss_module, "reduce_weighted_values")
def _reduce(
    values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None, *, original
):
    """The loss of this rank's rows, scaled so that its gradient is right after weighting by the share."""
    loss = original(values, sample_weight, mask, reduction, dtype)
    step = current_step()
    if step is None or of_whole_batch():
        return loss
    warn_of_scalar(values)
    if reduction == "sum":
        # Weighting by the share would make it a mean.
        return tf.math.divide_no_nan(loss, tf.cast(_share(step), loss.dtype))
    if reduction in ("mean", "sum_over_batch_size") and mask is not None:
        # A masked mean is divided by the valid entries of this rank, and must be by those of all ranks.
        divisor = tf.reduce_sum(tf.cast(mask, "float32"))
    elif reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
        weights = loss_module.apply_mask(sample_weight, mask, loss.dtype, reduction)
        divisor = tf.cast(tf.reduce_sum(weights), "float32")
    else:
        return loss
    return loss * tf.cast(step.share_of(divisor) * _num_parts(step), loss.dtype)


def of_each_sample(loss):
    """A loss for each sample (`reduction=None`), which the tape sums and does not average."""
    step = current_step()
    if step is None or loss is None or len(loss.shape) == 0:
        return loss

    @custom_gradient
    def counted_in_full(values):
        # Only the gradient is weighted by the share later; the reported loss is not.
        return values, lambda dy: tf.math.divide_no_nan(dy, tf.cast(_share(step), dy.dtype))

    return counted_in_full(loss)


def _num_parts(step: KerasStep) -> int:
    """The number of losses, one for each micro-batch, whose mean is the objective of a rank's step."""
    return role_of(step.model).num_microbatches if step.kind == "train" else 1


def _share(step: KerasStep) -> tf.Tensor:
    """The share of the samples of a step in one loss."""
    return step.gradient_share / _num_parts(step)
