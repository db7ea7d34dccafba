"""Sums of numbers that are sent in a narrower dtype than they are stored in.

Half the bytes are sent, at the cost of one rounding of each addend and of the sum: the addition uses the
stored dtype. Every rank sums its part, and the parts are gathered. (1-bit and sparse schemes, which need an
error feedback, are separate.)
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives.engine import reduce_locally, shape_of
from tfdist.collectives.group import Group
from tfdist.collectives.operations import all_gather, all_to_all


def is_narrower(communication_dtype: tf.DType | None, dtype: tf.DType) -> bool:
    """Whether numbers of a dtype are sent in another dtype that has fewer bytes."""
    return communication_dtype is not None and communication_dtype.size < dtype.size


def narrow_all_reduce(vector, group: Group, reduction: str, dtype: tf.DType, *, name: str):
    """As `all_reduce`, of a vector.

    Args:
        vector: A tensor of shape [n], of a floating dtype.
        group: The group.
        reduction: "sum" or "mean".
        dtype: The dtype that is sent: `tf.bfloat16` or `tf.float16`, in which values above 65504 are
            infinite.
        name: What the operation serves, for messages.

    Returns:
        A tensor of the shape and dtype of `vector`, bitwise the same on all members.
    """
    (size,) = shape_of(vector)
    padded = tf.pad(vector, [[0, -size % group.size]])
    own = narrow_reduce_scatter(padded, group, reduction, dtype, name=name)
    whole = all_gather(tf.cast(own, dtype), group, name=f"{name}/sums")
    return tf.ensure_shape(tf.cast(whole, vector.dtype)[:size], vector.shape)


def narrow_reduce_scatter(vector, group: Group, reduction: str, dtype: tf.DType, *, name: str):
    """As `reduce_scatter`, of a vector whose size is a multiple of the size of the group.

    The arguments are those of `narrow_all_reduce`.

    Returns:
        This member's share, of shape [n / size] and the dtype of `vector`.
    """
    parts = all_to_all(tf.cast(vector, dtype), group, name=f"{name}/parts")
    own = reduce_locally(tf.cast(tf.reshape(parts, [group.size, -1]), vector.dtype), reduction)
    share = None if vector.shape[0] is None else vector.shape[0] // group.size
    return tf.ensure_shape(own, [share])
