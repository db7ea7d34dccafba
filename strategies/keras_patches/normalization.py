"""Synchronized BatchNormalization: one reduction a layer and direction, where Keras makes three."""

from __future__ import annotations

import math

import tensorflow as tf

from tfdist.context import current_replica
from tfdist.keras_internals.patching import Patch
from tfdist.keras_internals.private import nn

__all__ = ["PATCHES"]


def _compute_moments_sync(original, x, axes, keepdims):
    """The mean and variance of all ranks' rows, from sums that travel together.

    Every layer waits for its statistics before it goes on, so a step pays for the latency of each
    reduction. The number of entries travels along only where ranks may differ in rows.
    """
    replica = current_replica()
    if replica is None or replica.strategy.gradient_group.size == 1:
        return original(x, axes, keepdims)
    sums = tf.reduce_sum(x, axis=axes, keepdims=True)
    squares = tf.reduce_sum(tf.square(x), axis=axes, keepdims=True)
    parts = [tf.reshape(sums, [-1]), tf.reshape(squares, [-1])]
    sizes = [x.shape[axis] for axis in axes]
    even = replica.step is not None and replica.step.is_even and None not in sizes
    if not even:
        parts.append(tf.cast(tf.reshape(tf.size(x) // tf.size(sums), [1]), x.dtype))
    own = tf.concat(parts, axis=0)
    packed = replica.all_reduce("SUM", own)
    channels = tf.size(sums)
    if even:
        count = tf.constant(float(math.prod(sizes) * replica.strategy.gradient_group.size), x.dtype)
    else:
        count = packed[-1]
    mean = tf.reshape(tf.math.divide_no_nan(packed[:channels], count), tf.shape(sums))
    mean_square = tf.math.divide_no_nan(packed[channels : 2 * channels], count)
    variance = tf.maximum(tf.reshape(mean_square, tf.shape(sums)) - tf.square(mean), 0.0)
    mean, variance = tf.ensure_shape(mean, sums.shape), tf.ensure_shape(variance, sums.shape)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


PATCHES = (Patch(nn, "_compute_moments_sync", ("x", "axes", "keepdims"), _compute_moments_sync),)
