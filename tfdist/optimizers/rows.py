"""Sparse gradients: the rows of an embedding's gradient, among the ranks of the data axis.

The gradient of a lookup is a `tf.IndexedSlices` with a row for each id that was looked up, and an id
that was looked up twice has two. Keras' optimizers do not add these up first: Adam's second moment
takes in the sum of their squares. So the update that a single process makes needs the rows of all
ranks, and not only their sum, unless the optimizer is one of those that look at the sum alone.
"""

from __future__ import annotations

import math

import keras
import tensorflow as tf

from tfdist.collectives import Group, all_gather
from tfdist.optimizers.elementwise import unwrapped
from tfdist.optimizers.zero.flat import FlatSharding

__all__ = ["needs_rows", "reduce_rows", "shard_of_rows"]

#: Optimizers to which a sparse gradient is the dense one that it adds up to.
_OF_SUMS = (keras.optimizers.SGD, keras.optimizers.Lion)


def needs_rows(optimizer) -> bool:
    """Whether an optimizer's update depends on the rows of a sparse gradient, and not on their sum.

    Keras clips rows one by one, and takes the norm over them. Where it accumulates gradients it adds
    rows up itself.
    """
    optimizer = unwrapped(optimizer)
    if optimizer.gradient_accumulation_steps:
        return False
    if optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue:
        return True
    return not any(
        isinstance(optimizer, kind) and type(optimizer).update_step is kind.update_step
        for kind in _OF_SUMS
    )


def reduce_rows(
    gradient: tf.IndexedSlices, group: Group, reduction: str, name: str
) -> tf.IndexedSlices:
    """The rows of all ranks, in the order of the ranks: those of the whole batch.

    Args:
        gradient: This rank's rows, values of shape [rows, ...]; as many as there are.
        group: The ranks of the data axis.
        reduction: "sum" or "mean": whether values are divided by the number of ranks.
        name: What travels, for messages.
    """
    values = all_gather(gradient.values, group, uneven=True, name=f"{name}/rows")
    indices = all_gather(gradient.indices, group, uneven=True, name=f"{name}/indices")
    if reduction == "mean":
        values /= tf.cast(group.size, values.dtype)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def shard_of_rows(gradient: tf.IndexedSlices, sharding: FlatSharding) -> tf.IndexedSlices:
    """What lies of a sparse gradient in this rank's flat shard, as a sparse gradient of the shard.

    A row that begins or ends in another rank's shard is cut. What comes twice stays so.

    Args:
        gradient: Rows of the array, values of shape [rows, ...].
        sharding: How the array is cut.

    Returns:
        Entries of the shard: values of shape [entries], indices in [0, share).
    """
    width = math.prod(sharding.local_shape[1:])
    begin = min(sharding.group.rank * sharding.share, sharding.size)
    end = min(begin + sharding.share, sharding.size)
    indices = tf.cast(gradient.indices, tf.int64)
    near = tf.logical_and(indices >= begin // width, indices < math.ceil(end / width))
    rows = tf.boolean_mask(tf.reshape(gradient.values, [-1, width]), near)
    places = tf.boolean_mask(indices, near)[:, None] * width + tf.range(width, dtype=tf.int64)
    inside = tf.logical_and(places >= begin, places < end)
    return tf.IndexedSlices(
        tf.boolean_mask(rows, inside),
        tf.boolean_mask(places, inside) - begin,
        tf.constant([sharding.share], tf.int64),
    )
