"""Synchronized BatchNormalization: one collective per layer and direction, where Keras has three.

Each rank computes the mean of its own entries and the sum of squares around that mean, which are combined as
in Chan, Golub and LeVeque (1979), "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances".
Keras subtracts the square of the mean from the mean of squares, which loses precision if the mean is large
compared with the deviation.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tfdist.backend.keras.patching import Patches
from tfdist.backend.keras.private import nn
from tfdist.collectives import all_gather
from tfdist.step.context import current_replica
from tfdist.step.keras_step import weighted

PATCHES = Patches()


@PATCHES.of(nn, "_compute_moments_sync")
def _compute_moments_sync(x, axes, keepdims, *, original):
    """The mean and variance of all ranks' entries, with one collective.

    Every layer waits for its statistics, so each collective adds its latency to the step. The number of entries
    is sent, too, if ranks may have different numbers of rows.
    """
    replica = current_replica()
    if replica is None or replica.gradient_group.size == 1:
        return original(x, axes, keepdims)
    group = replica.gradient_group
    mean = tf.reduce_mean(x, axis=axes, keepdims=True)
    squares = tf.reduce_sum(tf.math.squared_difference(x, mean), axis=axes, keepdims=True)
    parts = [tf.reshape(mean, [-1]), tf.reshape(squares, [-1])]
    sizes = [x.shape[axis] for axis in axes]
    is_even = replica.step is not None and replica.step.is_even and None not in sizes
    if not is_even:
        parts.append(tf.cast(tf.reshape(tf.size(x) // tf.size(mean), [1]), x.dtype))
    own = tf.concat(parts, axis=0)[None]
    if replica.has_padding is not None:
        own = tf.where(replica.has_padding, tf.zeros_like(own), own)
    every = weighted(lambda part: all_gather(part, group, name="moments"), own, replica.step)
    channels = tf.size(mean)
    means, squares = every[:, :channels], every[:, channels : 2 * channels]
    counts = tf.constant(float(math.prod(sizes)), x.dtype) if is_even else every[:, -1:]
    total = tf.reduce_sum(counts * tf.ones_like(every[:, :1]))
    whole = tf.math.divide_no_nan(tf.reduce_sum(counts * means, axis=0), total)
    squares = tf.reduce_sum(squares + counts * tf.math.squared_difference(means, whole), axis=0)
    variance = tf.reshape(tf.math.divide_no_nan(squares, total), tf.shape(mean))
    mean = tf.ensure_shape(tf.reshape(whole, tf.shape(mean)), mean.shape)
    variance = tf.ensure_shape(variance, mean.shape)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance
