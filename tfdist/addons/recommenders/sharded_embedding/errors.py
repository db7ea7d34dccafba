"""Ids outside their vocabulary: an error that all ranks raise, with the name of the feature."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.addons.recommenders.sharded_embedding.config import FeatureConfig
from tfdist.collectives import Group


def error_of(
    features: Sequence[FeatureConfig], ids: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """The error of a rank's ids, and valid ids to look up.

    Args:
        features: The features.
        ids: The ids of each.

    Returns:
        An int32 vector: the number of the first feature with a bad id, counted from 1, and the two
        halves of that id; zeros if all ids are valid. And the ids, int32 where the vocabularies
        allow, with 0 for bad ones.
    """
    codes, bad, good = [], [], []
    for number, (feature, some) in enumerate(zip(features, ids, strict=True)):
        size = feature.table.vocabulary_size
        some = tf.cast(some, tf.int64) if some.dtype != tf.int32 else some
        if some.dtype == tf.int32 and size > tf.int32.max:
            is_bad = some < 0
        else:
            is_bad = tf.logical_or(some < 0, some >= tf.constant(size, some.dtype))
        has_bad = tf.reduce_any(is_bad)
        codes.append(tf.where(has_bad, number + 1, 0))
        worst = tf.reduce_max(tf.where(is_bad, some, some.dtype.min))
        bad.append(tf.cast(worst, tf.int64))
        some = tf.where(is_bad, tf.zeros_like(some), some)
        good.append(tf.cast(some, tf.int64 if size > tf.int32.max else tf.int32))
    first = tf.argmax(tf.cast(tf.stack(codes) > 0, tf.int32))
    code, worst = tf.gather(codes, first), tf.gather(bad, first)
    halves = tf.bitcast(tf.where(code > 0, worst, tf.zeros_like(worst)), tf.int32)
    return tf.concat([code[None], halves], axis=0), good


def raise_errors(layer, errors: tf.Tensor, group: Group | None) -> tf.Operation | None:
    """Raises the same error on all ranks if any rank has one.

    Args:
        layer: The `ShardedEmbedding`.
        errors: The result of `error_of` on each rank: [ranks, 3].
        group: The ranks; None for one.

    Raises:
        tf.errors.InvalidArgumentError: There is an error.
    """
    codes = errors[:, 0]
    rank = tf.argmax(tf.cast(codes > 0, tf.int32), output_type=tf.int32)
    place = tf.maximum(codes[rank] - 1, 0)
    features = layer.features
    names = tf.gather([feature.name for feature in features], place)
    sizes = tf.gather(tf.constant([f.table.vocabulary_size for f in features], tf.int64), place)
    ranks = tf.constant([0] if group is None else list(group.ranks), tf.int32)
    return tf.debugging.Assert(
        tf.reduce_all(codes == 0),
        [
            "An id must be in the vocabulary of its table, [0, size). Received: feature",
            names,
            "id",
            tf.bitcast(errors[rank, 1:], tf.int64),
            "size",
            sizes,
            "rank",
            ranks[rank],
            f"layer {layer.name}",
        ],
    )
