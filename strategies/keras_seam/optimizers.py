"""Optimizers: gradients become global before anything looks at them.

Keras reduces gradients over replicas in the last moment, after it has clipped and accumulated
each replica's own. Clipping then sees other norms than a single process would, and a loss scale
that one rank finds too large is found so by that rank only.
"""

from __future__ import annotations

import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer

from tfdist.collectives import all_reduce
from tfdist.layers.sharding import mark_split, sharding_of
from tfdist.optimizers.clipping import clip_split_gradients
from tfdist.optimizers.elementwise import check_elementwise
from tfdist.pipeline.staging import mark_staged, staging_of
from tfdist.strategies.gradients import sum_partial_gradients, weigh_gradients
from tfdist.strategies.keras_seam.wrapping import Wrapper
from tfdist.strategies.replica import current_replica, current_step

__all__ = ["WRAPPERS"]


def _apply_gradients(original, self, grads, trainable_variables):
    """Before accumulation: a micro-step's gradient counts by that micro-step's shares."""
    replica = current_replica()
    if replica is not None:
        # What follows gets the gradients without their variables.
        replica.applied_to[id(self)] = list(trainable_variables)
        if any(sharding_of(variable) is not None for variable in trainable_variables):
            check_elementwise(self)
    return original(self, weigh_gradients(grads, current_step()), trainable_variables)


def _clip_gradients(original, self, grads):
    """After accumulation and before clipping: the one reduction of the step."""
    replica = current_replica()
    if replica is None:
        return original(self, grads)
    replica.reduced.add(id(self))
    grads = _reduce(self, replica, grads)
    variables = replica.applied_to.get(id(self), ())
    shardings = [sharding_of(variable) for variable in variables]
    stagings = [staging_of(variable) for variable in variables]
    if any(shardings) or any(stagings):
        return clip_split_gradients(self, grads, shardings, stagings)
    return original(self, grads)


def _all_reduce_sum_gradients(original, self, grads_and_vars):
    """Where Keras would reduce: for optimizers that do not clip at all."""
    replica = current_replica()
    if replica is None:
        return original(self, grads_and_vars)
    if id(self) in replica.reduced:
        return grads_and_vars
    grads_and_vars = list(grads_and_vars)
    grads = _reduce(self, replica, [grad for grad, _ in grads_and_vars])
    return [(grad, variable) for grad, (_, variable) in zip(grads, grads_and_vars, strict=True)]


def _add_variable_from_reference(original, self, reference_variable, *args, **kwargs):
    """The moments of a slice are slices of the moments, and lie where it lies."""
    variable = original(self, reference_variable, *args, **kwargs)
    sharding = sharding_of(reference_variable)
    if sharding is not None:
        mark_split(variable, sharding)
    staging = staging_of(reference_variable)
    if staging is not None:
        mark_staged(variable, staging)
    return variable


def _check_finite(original, self, grads):
    """A gradient that overflows on one rank skips the step on all."""
    finite = original(self, grads)
    replica = current_replica()
    if replica is None:
        return finite
    return all_reduce(tf.cast(finite, tf.bool), replica.strategy.group(), "min", name="finite")


def _reduce(optimizer, replica, grads) -> list:
    variables = replica.applied_to.get(id(optimizer), ())
    bucket_bytes = replica.strategy.extended.bucket_bytes
    grads = sum_partial_gradients(grads, variables, bucket_bytes)
    reduction = "sum" if replica.step is None else "mean"
    # Keras takes the norm of a sparse gradient over its rows as they come, also of one id.
    norms = bool(optimizer.clipnorm or optimizer.global_clipnorm)
    return replica.strategy.extended.reduce_gradients(grads, reduction, keep_rows=norms)


WRAPPERS = (
    Wrapper(
        BaseOptimizer,
        "_backend_apply_gradients",
        ("self", "grads", "trainable_variables"),
        _apply_gradients,
    ),
    Wrapper(BaseOptimizer, "_clip_gradients", ("self", "grads"), _clip_gradients),
    Wrapper(
        TFOptimizer,
        "_all_reduce_sum_gradients",
        ("self", "grads_and_vars"),
        _all_reduce_sum_gradients,
    ),
    Wrapper(
        BaseOptimizer,
        "add_variable_from_reference",
        ("self", "reference_variable"),
        _add_variable_from_reference,
    ),
    Wrapper(LossScaleOptimizer, "check_finite", ("self", "grads"), _check_finite),
)
