"""Sparse gradients: the rows of an embedding's gradient, among the ranks of the data axis.

The gradient of a lookup is a `tf.IndexedSlices` with a row for each id that was looked up, and an id
that was looked up twice has two. Keras' optimizers do not add these up first: Adam's second moment
takes in the sum of their squares. So the update that a single process makes needs the rows of all
ranks, and not only their sum, unless the optimizer is one of those that look at the sum alone.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tfdist.backend.graph.compiling import needs_fixed_sizes
from tfdist.backend.graph.dependence import is_independent_of_batch
from tfdist.collectives import Group, all_gather
from tfdist.sharding.parts import FlatShard


def reduce_rows(
    gradient: tf.IndexedSlices, group: Group, reduction: str, name: str
) -> tf.IndexedSlices:
    """The rows of the whole batch, in the order of the ranks.

    Rows of ids that do not come from the batch, as those of positions, are added up over the ranks, as
    one process adds them up over the batch.

    Args:
        gradient: This rank's rows, values of shape [rows, ...]; as many as there are.
        group: The ranks of the data axis.
        reduction: "sum" or "mean": whether values are divided by the number of ranks.
        name: What travels, for messages.
    """
    reduced = [
        _reduce_lookup(lookup, group, f"{name}/{place}" if place else name)
        for place, lookup in enumerate(_lookups(gradient))
    ]
    values = tf.concat([rows.values for rows in reduced], axis=0)
    indices = tf.concat([rows.indices for rows in reduced], axis=0)
    if reduction == "mean":
        values /= tf.cast(group.size, values.dtype)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _lookups(gradient: tf.IndexedSlices) -> list[tf.IndexedSlices]:
    """The gradients of single lookups in a table, which TensorFlow has joined."""
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
    values = all_gather(gradient.values, group, uneven=True, name=f"{name}/rows")
    indices = all_gather(gradient.indices, group, uneven=True, name=f"{name}/indices")
    # An eager tensor does not say where it comes from: there equal ids on all ranks stand for it.
    if not tf.executing_eagerly() and not is_independent_of_batch(gradient.indices):
        return tf.IndexedSlices(values, indices, gradient.dense_shape)
    # Ranks with data of their own may have sequences of other lengths.
    own = gradient.indices
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
    """What lies of a sparse gradient in this rank's flat shard, as a sparse gradient of the shard.

    A row that begins or ends in another rank's shard is cut. What comes twice stays so.

    Args:
        gradient: Rows of the array, values of shape [rows, ...].
        shard: How the array is cut.

    Returns:
        Entries of the shard: values of shape [entries], indices in [0, share). Where sizes are fixed, what
        lies in other shards is zero at place 0: no elementwise update, norm or clipping is another for it.
    """
    width = math.prod(shard.array_shape[1:])
    begin, end = shard.span
    indices = tf.cast(gradient.indices, tf.int64)
    if needs_fixed_sizes():
        rows = tf.reshape(gradient.values, [-1, width])
        places = indices[:, None] * width + tf.range(width, dtype=tf.int64)
        inside = tf.logical_and(places >= begin, places < end)
        return tf.IndexedSlices(
            tf.reshape(tf.where(inside, rows, tf.zeros([], rows.dtype)), [-1]),
            tf.reshape(tf.where(inside, places - begin, tf.zeros([], tf.int64)), [-1]),
            tf.constant([shard.share], tf.int64),
        )
    near = tf.logical_and(indices >= begin // width, indices < math.ceil(end / width))
    rows = tf.boolean_mask(tf.reshape(gradient.values, [-1, width]), near)
    places = tf.boolean_mask(indices, near)[:, None] * width + tf.range(width, dtype=tf.int64)
    inside = tf.logical_and(places >= begin, places < end)
    return tf.IndexedSlices(
        tf.boolean_mask(rows, inside),
        tf.boolean_mask(places, inside) - begin,
        tf.constant([shard.share], tf.int64),
    )


def shard_of_gradient(gradient, shard: FlatShard | None):
    """This rank's shard of a gradient that is whole; all of it where that is None."""
    if shard is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return shard_of_rows(gradient, shard)
    return None if gradient is None else shard.local_shard(gradient)
