"""Clipping by norm where ranks hold slices: each parameter counts once, and whole."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.layers.sharding import Sharding, sum_over_split

__all__ = ["clip_split_gradients", "squared_norms"]


def squared_norms(gradients: Sequence, shardings: Sequence[Sharding | None]) -> list:
    """The squared norm of each gradient's global array; None stays None.

    Args:
        gradients: Tensors or None.
        shardings: What part of a global array each is, or None.
    """
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    own = [_sum_of_squares(gradients[place]) for place in places]
    groups = [getattr(shardings[place], "group", None) for place in places]
    norms: list = [None] * len(gradients)
    for place, norm in zip(places, sum_over_split(own, groups), strict=True):
        norms[place] = norm
    return norms


def clip_split_gradients(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence,
    shardings: Sequence[Sharding | None],
) -> list:
    """What `optimizer` clips: by value, by each gradient's norm, or by the norm of all.

    Args:
        optimizer: It says how: `clipnorm`, `global_clipnorm` or `clipvalue`.
        gradients: Tensors, IndexedSlices or None, reduced already.
        shardings: What part of a global array each is, or None.
    """
    if not any((optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)):
        return list(gradients)
    if optimizer.clipnorm:
        scales = [
            None
            if square is None
            else optimizer.clipnorm / tf.maximum(tf.sqrt(square), optimizer.clipnorm)
            for square in squared_norms(gradients, shardings)
        ]
    elif optimizer.global_clipnorm:
        limit = optimizer.global_clipnorm
        present = [square for square in squared_norms(gradients, shardings) if square is not None]
        norm = tf.sqrt(tf.add_n(present))
        # Not a number where the norm is none, as in Keras.
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        scales = [scale] * len(gradients)
    else:
        limit = optimizer.clipvalue
        dense = [None if grad is None else tf.convert_to_tensor(grad) for grad in gradients]
        return [None if grad is None else tf.clip_by_value(grad, -limit, limit) for grad in dense]
    return [
        None if gradient is None else _times(gradient, scale)
        for gradient, scale in zip(gradients, scales, strict=True)
    ]


def _sum_of_squares(gradient):
    """Rows of a sparse gradient count each by itself, also of one id, as they do in Keras."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))


def _times(gradient, scale):
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(scale, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(scale, gradient.dtype)
