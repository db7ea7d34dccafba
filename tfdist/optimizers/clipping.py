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
    own = [tf.reduce_sum(tf.square(tf.cast(gradients[place], tf.float32))) for place in places]
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
    dense = [None if grad is None else tf.convert_to_tensor(grad) for grad in gradients]
    if optimizer.clipnorm:
        scales = [
            None if square is None else optimizer.clipnorm / tf.maximum(
                tf.sqrt(square), optimizer.clipnorm
            )
            for square in squared_norms(dense, shardings)
        ]
    elif optimizer.global_clipnorm:
        limit = optimizer.global_clipnorm
        present = [square for square in squared_norms(dense, shardings) if square is not None]
        norm = tf.sqrt(tf.add_n(present))
        # Not a number where the norm is none, as in Keras.
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        scales = [scale] * len(dense)
    else:
        limit = optimizer.clipvalue
        return [None if grad is None else tf.clip_by_value(grad, -limit, limit) for grad in dense]
    return [
        None if grad is None else grad * tf.cast(scale, grad.dtype)
        for grad, scale in zip(dense, scales, strict=True)
    ]
