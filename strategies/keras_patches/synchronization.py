"""Variables that ranks must agree on: at the start of training, and where layers keep state."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.collectives import broadcast
from tfdist.gradients.buckets import buckets
from tfdist.keras_step import KerasStep
from tfdist.layers.states import average_states, layer_states
from tfdist.local_steps import local_optimizer
from tfdist.sharding.layout import replicated_variables
from tfdist.sharding.parts import deep_copy

__all__ = [
    "broadcast_variables",
    "keep_states_without_samples",
    "kept_where_empty",
    "synchronize_layer_states",
]


def broadcast_variables(model: keras.Model) -> None:
    """Gives all ranks the chief's weights and optimizer state.

    Ranks that drew the same seeds already agree; what a user or a callback loaded on one rank
    only, they do not.
    """
    strategy = model.distribute_strategy
    kinds: dict[tuple[str, ...], list] = {}
    local = local_optimizer(model)
    # A checkpoint may just have given each rank what is its own.
    shared = local is None or not local.is_resumed
    for variable, axes in replicated_variables(model, after_sync=shared):
        kinds.setdefault(axes, []).append(variable)
    for axes, some in kinds.items():
        # By dtype, so that few buckets are needed.
        some.sort(key=lambda variable: variable.dtype)
        values = [(place, variable.value) for place, variable in enumerate(some)]
        for bucket in buckets(values, strategy.gradient_options.bucket_bytes):
            parts = [tf.reshape(tf.convert_to_tensor(some[p].value), [-1]) for p in bucket]
            flat = broadcast(tf.concat(parts, axis=0), strategy.group(*axes), name="variables")
            sizes = [part.shape.num_elements() for part in parts]
            # A variable that kept its part of a bucket's memory would keep all of it.
            for place, part in zip(bucket, tf.split(flat, sizes), strict=True):
                some[place].assign(tf.reshape(deep_copy(part), some[place].shape))


def synchronize_layer_states(model: keras.Model) -> None:
    """Averages what layers keep of the batches they saw, over the ranks that saw others.

    A BatchNormalization that is not `synchronized` follows its own rank's rows. Its moving
    averages are linear in what it saw, so averaging them when they are read gives what averaging
    after every step would.
    """
    average_states(layer_states(model), model.distribute_strategy.gradient_group)


def keep_states_without_samples(step: KerasStep) -> Callable:
    """Notes what the model holds of past samples; the returned function puts it back.

    For a rank that gets no sample in a step: metrics must not count a step of nothing, and layers
    saw a row that is not there. Layer states that the other ranks' samples moved (a synchronized
    BatchNormalization) stay moved.

    Args:
        step: The Keras step under way.
    """
    metrics = [variable for metric in step.model.metrics for variable in metric.variables]
    # A rank that steps by itself has no others whose samples would move anything.
    states = layer_states(step.model, of_own_rows=step.gradient_group.size > 1)
    return kept_where_empty([*metrics, *states], tf.convert_to_tensor(step.rows))


def kept_where_empty(variables: Sequence[keras.Variable], rows: tf.Tensor) -> Callable:
    """Notes the values of variables; the returned function puts them back if there are no rows.

    Args:
        variables: The variables.
        rows: This rank's number of samples, an int32 scalar.
    """
    before = [tf.identity(variable.value) for variable in variables]

    def put_back():
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        return rows

    return lambda: tf.cond(tf.equal(rows, 0), put_back, lambda: rows)
