"""Sparse gradients: the rows of an embedding's gradient, and the ranks of the data axis.

The gradient of a lookup is a `tf.IndexedSlices` with one row for each id that was looked up, and two rows
for an id that was looked up twice. Keras' optimizers do not add them up first: Adam adds the sum of their
squares to its second moment. So the update of a single process requires the rows of all ranks, and not
only their sum, unless the optimizer uses only the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.compiling import needs_fixed_sizes
from tfdist.backend.graph.dependence import is_independent_of_batch
from tfdist.collectives import Group, all_gather
from tfdist.sharding.parts import FlatShard


def reduce_rows(
    gradient: tf.IndexedSlices, group: Group, reduction: str, name: str
) -> tf.IndexedSlices:
    """Gathers the rows of the whole batch, in the order of the ranks.

    Rows for ids that do not depend on the batch, such as positions, are added up over the ranks, as one
    process adds them up over the batch.

    Args:
        gradient: This rank's rows, with values of shape [rows, ...]; ranks may have different numbers.
        group: The ranks of the data axis.
        reduction: "sum" or "mean", which divides values by the number of ranks.
        name: The name of the collectives, for messages.
    """
    reduced = [
        _reduce_lookup(lookup, group, f"{name}/{place}" if place else name)
        for place, lookup in enumerate(_lookups(gradient))
    ]
    rows = joined_rows(reduced)
    if reduction == "sum":
        return rows
    values = rows.values / tf.cast(group.size, rows.dtype)
    return tf.IndexedSlices(values, rows.indices, gradient.dense_shape)


def joined_rows(parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """The rows of several sparse gradients of one array."""
    values = tf.concat([rows.values for rows in parts], axis=0)
    indices = tf.concat([rows.indices for rows in parts], axis=0)
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def _lookups(gradient: tf.IndexedSlices) -> list[tf.IndexedSlices]:
    """The gradients of the lookups in a table, which TensorFlow has concatenated."""
    if not tf.is_symbolic_tensor(gradient.indices) or gradient.indices.op.type != "ConcatV2":
        return [gradient]
    parts = list(gradient.indices.op.inputs)[:-1]
    if not any(map(is_independent_of_batch, parts)):
        return [gradient]
    values = tf.split(gradient.values, [tf.size(part) for part in parts])
    return [
        tf.IndexedSlices(some, part, gradient.dense_shape)
        for some, part in zip(values, parts, strict=True)
    ]


def _reduce_lookup(gradient: tf.IndexedSlices, group: Group, name: str) -> tf.IndexedSlices:
    # A size that is known in a graph is the same on all ranks.
    uneven = tf.executing_eagerly() or gradient.indices.shape[0] is None
    values = all_gather(gradient.values, group, uneven=uneven, name=f"{name}/rows")
    indices = all_gather(gradient.indices, group, uneven=uneven, name=f"{name}/indices")
    # Eager tensors have no history: equal ids on all ranks count as independent of the batch.
    if not tf.executing_eagerly() and not is_independent_of_batch(gradient.indices):
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    # Ranks with separate datasets may have sequences of different lengths.
    own = gradient.indices
    with devices.on_host():
        are_equal = tf.cond(
            tf.equal(tf.size(indices), tf.size(own) * group.size),
            lambda: tf.reduce_all(tf.equal(tf.reshape(indices, [group.size, -1]), own[None])),
            lambda: tf.constant(False),
        )
    parts = tf.concat([[group.size, -1], tf.shape(values)[1:]], axis=0)
    values, indices = tf.cond(
        are_equal,
        lambda: (tf.reduce_sum(tf.reshape(values, parts), axis=0), own),
        lambda: (values, indices),
    )
    values.set_shape([None, *gradient.values.shape[1:]])
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def shard_of_rows(gradient: tf.IndexedSlices, shard: FlatShard) -> tf.IndexedSlices:
    """The part of a sparse gradient in this rank's flat shard, as a sparse gradient of the shard.

    A row that begins or ends in another rank's shard is cut. Duplicate entries are kept.

    Args:
        gradient: Rows of the array, with values of shape [rows, ...].
        shard: The flat shard.

    Returns:
        Entries of the shard, with values of shape [entries] and indices in [0, share). Where XLA requires
        fixed sizes, and on GPUs, entries in other shards become zeros at index 0, which change no elementwise
        update, norm or clipping.
    """
    width = math.prod(shard.array_shape[1:])
    begin, end = shard.span
    rows, indices = tf.reshape(gradient.values, [-1, width]), tf.cast(gradient.indices, tf.int64)
    # For a size that depends on values, the host waits for all that a GPU has to compute.
    has_fixed_sizes = needs_fixed_sizes() or devices.has_gpu()
    if not has_fixed_sizes:
        near = tf.logical_and(indices >= begin // width, indices < math.ceil(end / width))
        rows, indices = tf.boolean_mask(rows, near), tf.boolean_mask(indices, near)
    places = indices[:, None] * width + tf.range(width, dtype=tf.int64)
    inside = tf.logical_and(places >= begin, places < end)
    if has_fixed_sizes:
        values = tf.reshape(tf.where(inside, rows, tf.zeros([], rows.dtype)), [-1])
        entries = tf.reshape(tf.where(inside, places - begin, tf.zeros([], tf.int64)), [-1])
    else:
        values, entries = tf.boolean_mask(rows, inside), tf.boolean_mask(places, inside) - begin
    return tf.IndexedSlices(values, entries, tf.constant([shard.share], tf.int64))


def shard_of_gradient(gradient, shard: FlatShard | None):
    """This rank's shard of a whole gradient; the whole gradient if `shard` is None."""
    if shard is None or gradient is None:
        return gradient
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    return shard_of_rows(gradient, shard) if is_sparse else shard.local_shard(gradient)


def times(gradient, factor, multiply: Callable = tf.multiply):
    """A gradient, dense or sparse, times a scalar; None stays None."""
    if gradient is None:
        return None
    factor = tf.cast(factor, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        values = multiply(gradient.values, factor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return multiply(gradient, factor)
