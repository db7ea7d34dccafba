"""Optimizers: gradients become global before anything looks at them.

Keras reduces gradients over replicas in the last moment, after it has clipped and accumulated
each replica's own. Clipping then sees other norms than a single process would, and a loss scale
that one rank finds too large is found so by that rank only.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfdist.layers.sharding import mark_split, mark_stored_flat, sharding_of, stored_flat
from tfdist.optimizers.buckets import BUCKET_BYTES
from tfdist.optimizers.clipping import clip_spread_gradients, is_spread
from tfdist.optimizers.elementwise import check_elementwise
from tfdist.optimizers.rows import needs_rows
from tfdist.optimizers.zero.flat import (
    FlatSharding,
    mark_state_split,
    state_sharding_of,
)
from tfdist.optimizers.zero.update import ShardView, publish, scatter_gradients
from tfdist.pipeline.staging import mark_staged, staging_of
from tfdist.strategies.gradients import sum_partial_gradients, weigh_gradients
from tfdist.strategies.keras_seam.wrapping import Wrapper
from tfdist.strategies.replica import current_replica, current_step

__all__ = ["WRAPPERS"]


def _apply_gradients(original, self, grads, trainable_variables):
    """Before accumulation: a micro-step's gradient counts by that micro-step's shares."""
    replica = current_replica()
    if replica is None:
        return original(self, grads, trainable_variables)
    # What follows gets the gradients without their variables.
    replica.applied_to[id(self)] = list(trainable_variables)
    replica.reduced.discard(id(self))
    if any(sharding_of(variable) is not None for variable in trainable_variables):
        check_elementwise(self)
    weighed = weigh_gradients(grads, current_step())
    # Those of parameters that are split themselves were weighed as they came.
    grads = [
        own if stored_flat(variable) is not None else new
        for own, new, variable in zip(grads, weighed, trainable_variables, strict=True)
    ]
    if self.gradient_accumulation_steps and replica.strategy.zero_stage >= 2:
        # Whole gradients would stand from one micro-step to the next.
        grads = _reduce(self, replica, grads)
    return original(self, grads, trainable_variables)


def _clip_gradients(original, self, grads):
    """After accumulation and before clipping: the one reduction of the step."""
    replica = current_replica()
    if replica is None:
        return original(self, grads)
    if id(self) not in replica.reduced:
        grads = _reduce(self, replica, grads)
    variables = replica.applied_to.get(id(self), ())
    if any(is_spread(variable) for variable in variables):
        return clip_spread_gradients(self, grads, variables)
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


def _build(original, self, variables):
    """Under ZeRO the state of each parameter is that of this rank's flat shard."""
    strategy: Any = tf.distribute.get_strategy()
    if getattr(strategy, "zero_stage", 0):
        check_elementwise(self)
        for variable in variables:
            sharding = stored_flat(variable) or FlatSharding(
                strategy.group("data"),
                tuple(variable.shape),
                sharding_of(variable),
                strategy.wire_dtype,
            )
            mark_state_split(variable, sharding)
    return original(self, variables)


def _add_variable_from_reference(original, self, reference_variable, name=None, *args, **kwargs):
    """The moments of a slice are slices of the moments, and lie where it lies."""
    split = state_sharding_of(reference_variable)
    if split is not None and name == "gradient_accumulator":
        strategy: Any = tf.distribute.get_strategy()
        split = split if strategy.zero_stage >= 2 else None
    like = reference_variable
    if split is not None:
        like = _Shape(reference_variable.path, (split.share,), reference_variable.dtype)
    variable = original(self, like, name, *args, **kwargs)
    sharding = sharding_of(reference_variable)
    if split is not None:
        mark_stored_flat(variable, split)
    elif sharding is not None:
        mark_split(variable, sharding)
    staging = staging_of(reference_variable)
    if staging is not None:
        mark_staged(variable, staging)
    return variable


@dataclasses.dataclass
class _Shape:
    """All that an optimizer's variable takes over from its reference."""

    path: str
    shape: tuple[int, ...]
    dtype: str


def _update_step(original, self, grads, trainable_variables, learning_rate):
    """Under ZeRO each rank updates its shards, and then all get the whole parameters."""
    with _shards_of(trainable_variables) as variables:
        return original(self, grads, variables, learning_rate)


def _of_shards(original, self, trainable_variables):
    """Moving averages of parameters are split as the rest of the state."""
    with _shards_of(trainable_variables) as variables:
        return original(self, variables)


@contextlib.contextmanager
def _shards_of(variables) -> Iterator[list]:
    """Variables, those whose state is split as their shards; in the end all ranks get the whole."""
    views = []
    found: list = []
    for variable in variables:
        split = state_sharding_of(variable)
        if split is None or stored_flat(variable) is not None:
            found.append(variable)
        else:
            views.append(ShardView(variable.value, split))
            found.append(views[-1])
    yield found
    changed = [view for view in views if view.is_changed]
    if changed:
        # At the end of `fit`, where averages become the parameters, no strategy is in scope.
        extended: Any = tf.distribute.get_strategy().extended
        publish(changed, getattr(extended, "bucket_bytes", BUCKET_BYTES))


def _reduce(optimizer, replica, grads) -> list:
    variables = replica.applied_to.get(id(optimizer), ())
    bucket_bytes = replica.strategy.extended.bucket_bytes
    replica.reduced.add(id(optimizer))
    grads = sum_partial_gradients(grads, variables, bucket_bytes)
    reduction = "sum" if replica.step is None else "mean"
    keep_rows = needs_rows(optimizer)
    if not any(state_sharding_of(variable) for variable in variables):
        return replica.strategy.extended.reduce_gradients(grads, reduction, keep_rows=keep_rows)
    # Those of parameters that are split themselves were reduced as they came.
    splits = [None if stored_flat(v) is not None else state_sharding_of(v) for v in variables]
    return scatter_gradients(grads, splits, reduction, bucket_bytes, keep_rows=keep_rows)


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
    Wrapper(BaseOptimizer, "build", ("self", "variables"), _build),
    Wrapper(
        TFOptimizer,
        "_backend_update_step",
        ("self", "grads", "trainable_variables", "learning_rate"),
        _update_step,
    ),
    Wrapper(
        BaseOptimizer,
        "_update_model_variables_moving_average",
        ("self", "trainable_variables"),
        _of_shards,
    ),
    Wrapper(
        TFOptimizer,
        "_overwrite_model_variables_with_average_value",
        ("self", "trainable_variables"),
        _of_shards,
    ),
)
