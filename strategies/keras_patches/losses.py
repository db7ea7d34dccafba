"""Losses: inside a Keras step a loss is that of this rank's rows, as if they were the batch.

Keras divides losses by the number of replicas, and multiplies again where it reports them. That
is exact only for equal shares and for losses that Keras itself averages: a custom `train_step`
that reports what it computed would be off by that factor. tfdist weighs gradients instead (see
`tfdist.step.context.KerasStep`), and losses that are not a mean over samples are brought
into that form here.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.keras.patching import Patch
from tfdist.backend.keras.private import loss_module
from tfdist.step.context import current_step, role_of
from tfdist.step.keras_step import KerasStep
from tfdist.strategies.keras_patches.batch_losses import notice_scalar, of_whole_batch


def _scale(value, *, original):
    return original(value) if current_step() is None else value


def _reduce(
    values, sample_weight=None, mask=None, reduction="sum_over_batch_size", dtype=None, *, original
):
    """The loss of this rank's rows, so scaled that its gradient is right once weighed by share."""
    loss = original(values, sample_weight, mask, reduction, dtype)
    step = current_step()
    if step is None or of_whole_batch():
        return loss
    notice_scalar(values)
    if reduction == "sum":
        # Weighing by share would make a mean of it.
        return tf.math.divide_no_nan(loss, tf.cast(_share(step), loss.dtype))
    if reduction in ("mean", "sum_over_batch_size") and mask is not None:
        # A masked mean divides by this rank's valid entries; what counts are all ranks'.
        _refuse_microbatches(step, "outputs with a Keras mask")
        divisor = tf.reduce_sum(tf.cast(mask, "float32"))
    elif reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
        _refuse_microbatches(step, f"reduction={reduction!r}")
        weights = loss_module.apply_mask(sample_weight, mask, loss.dtype, reduction)
        divisor = tf.cast(tf.reduce_sum(weights), "float32")
    else:
        return loss
    return loss * tf.cast(step.share_of(divisor), loss.dtype)


def of_each_sample(loss):
    """A loss for each sample (`reduction=None`), which the tape sums and does not average."""
    step = current_step()
    if step is None or loss is None or len(loss.shape) == 0:
        return loss

    @custom_gradient
    def counted_in_full(values):
        # Only the gradient is weighted by share later; what is reported stays as it is.
        return values, lambda dy: tf.math.divide_no_nan(dy, tf.cast(_share(step), dy.dtype))

    return counted_in_full(loss)


def _num_parts(step: KerasStep) -> int:
    """Of how many losses the objective of a rank's step is the mean: those of its micro-batches."""
    return role_of(step.model).num_microbatches if step.kind == "train" else 1


def _share(step: KerasStep) -> tf.Tensor:
    """The part of the samples of a step that one loss is of."""
    return step.gradient_share / _num_parts(step)


def _refuse_microbatches(step: KerasStep, what: str) -> None:
    """Raises where a loss divides by a sum over samples that one micro-batch does not see.

    Raises:
        ValueError: The step is one of a pipeline, with several micro-batches.
    """
    if _num_parts(step) > 1:
        raise ValueError(
            f"A loss with {what} is a mean over the entries that count in the whole batch, of which a "
            "pipeline's micro-batch is a part. Give entries that do not count a `sample_weight` of 0, "
            "and take a loss with reduction='sum_over_batch_size'; or num_microbatches=1. Received: "
            f"num_microbatches={_num_parts(step)} in `{step.model.name}`."
        )


PATCHES = (
    Patch(loss_module, "scale_loss_for_distribution", ("value",), _scale),
    Patch(loss_module, "unscale_loss_for_distribution", ("value",), _scale),
    Patch(
        loss_module,
        "reduce_weighted_values",
        ("values", "sample_weight", "mask", "reduction", "dtype"),
        _reduce,
    ),
)
