"""Clipping by norm where ranks hold slices, shards or stages: each parameter counts once, whole."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.collectives import all_reduce
from tfdist.sharding.layout import layout_of, sum_over_parts
from tfdist.sharding.parts import FlatShard


def is_spread(variable) -> bool:
    """Whether this rank has a part only of the gradients of a model's parameters."""
    return layout_of(variable).is_spread


def squared_norms(
    gradients: Sequence, variables: Sequence, shards: Sequence[FlatShard | None] | None = None
) -> list:
    """The squared norm of each gradient's global array; None stays None.

    Args:
        gradients: Tensors or None, as the optimizer applies them.
        variables: Their variables.
        shards: The flat shards that the gradients are of; by default those that optimizers apply.
    """
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    sums = [_sum_of_squares(gradients[place]) for place in places]
    cuts = None if shards is None else [shards[place] for place in places]
    sums = sum_over_parts(sums, [variables[place] for place in places], cuts)
    norms: list = [None] * len(gradients)
    for place, norm in zip(places, sums, strict=True):
        norms[place] = norm
    return norms


def clip_spread_gradients(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence, variables: Sequence
) -> list:
    """What `optimizer` clips: by value, by each gradient's norm, or by the norm of all.

    Args:
        optimizer: It says how: `clipnorm`, `global_clipnorm` or `clipvalue`.
        gradients: Tensors, IndexedSlices or None, reduced already.
        variables: Their variables, some of which are split over ranks or belong to a stage.
    """
    if not any((optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)):
        return list(gradients)
    if optimizer.clipnorm:
        scales = [
            None
            if square is None
            else optimizer.clipnorm / tf.maximum(tf.sqrt(square), optimizer.clipnorm)
            for square in squared_norms(gradients, variables)
        ]
    elif optimizer.global_clipnorm:
        limit = optimizer.global_clipnorm
        norm = tf.sqrt(sum_over_stages(squared_norms(gradients, variables), variables))
        # Not a number where the norm is none, as in Keras.
        scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
        scales = [scale] * len(gradients)
        # Keras multiplies what the rows add up to.
        gradients = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
    else:
        limit = optimizer.clipvalue
        return [
            None if gradient is None else tf.clip_by_value(gradient, -limit, limit)
            for gradient in gradients
        ]
    return [
        None if gradient is None else times(gradient, scale)
        for gradient, scale in zip(gradients, scales, strict=True)
    ]


def sum_over_stages(squares: Sequence, variables: Sequence) -> tf.Tensor:
    """The sum of squared norms, those of other stages too."""
    stages = [layout_of(variable).stage for variable in variables]
    pipeline = next((stage.group for stage in stages if stage is not None), None)
    everywhere = [tf.constant(0.0)]
    on_stages = [tf.constant(0.0)]
    for square, stage in zip(squares, stages, strict=True):
        if square is None:
            continue
        if stage is None:
            everywhere.append(square)
        elif stage.counts:
            on_stages.append(square)
    if pipeline is None:
        return tf.add_n(everywhere)
    return tf.add_n(everywhere) + all_reduce(tf.add_n(on_stages), pipeline, name="norms")


def _sum_of_squares(gradient):
    """Rows of a sparse gradient count each by itself, also of one id, as they do in Keras."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))


def times(gradient, scale):
    """A gradient times a scalar."""
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(scale, gradient.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(scale, gradient.dtype)
