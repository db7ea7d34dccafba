"""Losses: inside a Keras step a loss is that of this rank's rows, as if they were the batch.

Keras divides losses by the number of replicas, and multiplies again where it reports them. That
is exact only for equal shares and for losses that Keras itself averages: a custom `train_step`
that reports what it computed would be off by that factor. tfdist weighs gradients instead (see
`tfdist.context.KerasStep`), and losses that are not a mean over samples are brought
into that form here.
"""

from __future__ import annotations

import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as loss_module
from keras.src.trainers.compile_utils import CompileLoss

from tfdist.context import KerasStep, current_step, role_of
from tfdist.gradients.non_finite import guard_of
from tfdist.graph.custom_gradient import custom_gradient
from tfdist.keras_internals.patching import Wrapper

__all__ = ["WRAPPERS"]


def _scale(original, value):
    return original(value) if current_step() is None else value


def _apply_mask(original, sample_weight, mask, dtype, reduction):
    """A masked mean divides by this rank's valid entries; what counts are all ranks'."""
    weights = original(sample_weight, mask, dtype, reduction)
    step = current_step()
    if step is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
        return weights
    _refuse_microbatches(step, "outputs with a Keras mask")
    valid = tf.reduce_sum(tf.cast(mask, "float32"))
    return weights * tf.cast(step.share_of(valid), weights.dtype)


def _reduce_values(original, values, sample_weight=None, reduction="sum_over_batch_size"):
    loss = original(values, sample_weight, reduction)
    step = current_step()
    if step is None:
        return loss
    if reduction == "sum":
        # Weighting by share would make a mean of it.
        return tf.math.divide_no_nan(loss, tf.cast(_share(step), loss.dtype))
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        _refuse_microbatches(step, f"reduction={reduction!r}")
        weight = tf.cast(tf.reduce_sum(sample_weight), "float32")
        return loss * tf.cast(step.share_of(weight), loss.dtype)
    return loss


def _compile_loss(original, self, y_true, y_pred, sample_weight=None):
    """A loss for each sample (`reduction=None`) is summed by the tape, not averaged."""
    loss = original(self, y_true, y_pred, sample_weight)
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
    return step.share / _num_parts(step)


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


def _watched_loss(original, self, *args, **kwargs):
    """The loss of a training step, looked at by the guard where there is one."""
    loss = original(self, *args, **kwargs)
    step, guard = current_step(), guard_of(self)
    if guard is None or step is None or step.kind != "train" or loss is None:
        return loss
    guard.note(loss)
    goes_on = guard.end_step()

    @custom_gradient
    def watched(loss):
        def gradient(dy):
            with tf.control_dependencies(goes_on):
                return tf.identity(dy)

        return tf.identity(loss), gradient

    return watched(loss)


WRAPPERS = (
    Wrapper(
        TensorFlowTrainer,
        "compute_loss",
        ("self", "x", "y", "y_pred", "sample_weight"),
        _watched_loss,
    ),
    Wrapper(CompileLoss, "call", ("self", "y_true", "y_pred", "sample_weight"), _compile_loss),
    Wrapper(loss_module, "scale_loss_for_distribution", ("value",), _scale),
    Wrapper(loss_module, "unscale_loss_for_distribution", ("value",), _scale),
    Wrapper(
        loss_module, "apply_mask", ("sample_weight", "mask", "dtype", "reduction"), _apply_mask
    ),
    Wrapper(loss_module, "reduce_values", ("values", "sample_weight", "reduction"), _reduce_values),
)
