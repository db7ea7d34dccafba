"""Sums of numbers that travel in a narrower dtype than they are kept in.

Half the bytes on the wire, and one rounding of each addend and of the sum: they are added up in the
dtype that they are kept in. Every rank adds up its part, and all get the parts. (1-bit and sparse
schemes, which need a memory of what was lost, are others.)
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives.group import Group
from tfdist.collectives.operations import all_gather, all_to_all


def is_narrower(communication_dtype: tf.DType | None, dtype: tf.DType) -> bool:
    """Whether numbers of a dtype are to travel in another, and that takes fewer bytes."""
    return communication_dtype is not None and communication_dtype.size < dtype.size


def narrow_all_reduce(vector, group: Group, reduction: str, dtype: tf.DType, *, name: str):
    """As `all_reduce`, of a vector.

    Args:
        vector: A tensor of shape [n], of a floating dtype.
        group: The group.
        reduction: "sum" or "mean".
        dtype: What travels: `tf.bfloat16` or `tf.float16`, in which what exceeds 65504 is infinite.
        name: What the operation serves, for messages.

    Returns:
        A tensor of the shape and dtype of `vector`, the same bits on all members.
    """
    size = tf.size(vector)
    padded = tf.pad(vector, [[0, -size % group.size]])
    own = narrow_reduce_scatter(padded, group, reduction, dtype, name=name)
    whole = all_gather(tf.cast(own, dtype), group, name=f"{name}/sums")
    return tf.ensure_shape(tf.cast(whole, vector.dtype)[:size], vector.shape)


def narrow_reduce_scatter(vector, group: Group, reduction: str, dtype: tf.DType, *, name: str):
    """As `reduce_scatter`, of a vector that divides by the size of the group.

    Args and dtypes are those of `narrow_all_reduce`.

    Returns:
        This member's share, of shape [n / size] and the dtype of `vector`.
    """
    parts = all_to_all(tf.cast(vector, dtype), group, name=f"{name}/parts")
    parts = tf.cast(tf.reshape(parts, [group.size, -1]), vector.dtype)
    own = tf.reduce_mean(parts, axis=0) if reduction == "mean" else tf.reduce_sum(parts, axis=0)
    share = None if vector.shape[0] is None else vector.shape[0] // group.size
    return tf.ensure_shape(own, [share])
