"""Norms of gradients over ranks that hold parts of them or copies, and clipping by them.

Where ranks hold slices, shards or stages, each parameter counts once, as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.collectives import all_reduce
from tfdist.gradients.sparse import times
from tfdist.mesh import Mesh
from tfdist.sharding.layout import layout_of, sum_over_parts
from tfdist.sharding.parts import FlatShard
from tfdist.utils.places import replace_at


def square_of(gradients: Sequence) -> tf.Tensor:
    """The squared norm of gradients that one process holds as a whole: a float64 scalar.

    Args:
        gradients: Tensors, IndexedSlices or None.
    """
    return square_parts([(gradient, 1) for gradient in gradients])


def weighted_square(gradients: Sequence, variables: Sequence, mesh: Mesh) -> tf.Tensor:
    """This rank's part of the squared norm of all gradients: the parts of all ranks add up to it.

    Args:
        gradients: Reduced tensors, IndexedSlices or None.
        variables: Their variables.
        mesh: The mesh.

    Returns:
        A float64 scalar.
    """
    pairs = zip(gradients, variables, strict=True)
    return square_parts([(gradient, _holders(variable, mesh)) for gradient, variable in pairs])


def square_parts(parts: Sequence[tuple]) -> tf.Tensor:
    """The sum of the squared norms of gradients, each divided by the number of ranks that count it."""
    found = [
        tf.cast(sum_of_squares(gradient), tf.float64) / holders
        for gradient, holders in parts
        if gradient is not None and holders
    ]
    return tf.add_n(found) if found else tf.constant(0.0, tf.float64)


def sum_of_squares(gradient) -> tf.Tensor:
    """The squared norm of a gradient. Rows of a sparse one count separately, as in Keras."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))


def _holders(variable, mesh: Mesh) -> int:
    """The number of ranks with the same part of a gradient; 0 where another rank counts it."""
    layout = layout_of(variable)
    if not layout.counts:
        return 0
    shard = layout.gradient_shard
    split = () if shard is None else shard.group.axes
    return math.prod(mesh.shape[axis] for axis in layout.replicated_axes(mesh) if axis not in split)


def squared_norms(
    gradients: Sequence, variables: Sequence, shards: Sequence[FlatShard | None] | None = None
) -> list:
    """The squared norm of each gradient's global array; None stays None.

    Args:
        gradients: Tensors or None, as the optimizer applies them.
        variables: Their variables.
        shards: The flat shards of the gradients; by default those that optimizers apply.
    """
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    sums = sum_over_parts(
        [sum_of_squares(gradients[place]) for place in places],
        [variables[place] for place in places],
        None if shards is None else [shards[place] for place in places],
    )
    norms: list = [None] * len(gradients)
    replace_at(norms, places, sums)
    return norms


def clip_spread_gradients(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence, variables: Sequence
) -> list:
    """Clips as `optimizer` specifies: by value, by the norm of each gradient, or by the global norm.

    Args:
        optimizer: The optimizer, with `clipnorm`, `global_clipnorm` or `clipvalue`.
        gradients: Reduced tensors, IndexedSlices or None.
        variables: Their variables, some of which are split over ranks or belong to a stage.
    """
    if limit := optimizer.clipnorm:
        scales = [
            None if square is None else limit / tf.maximum(tf.sqrt(square), limit)
            for square in squared_norms(gradients, variables)
        ]
    elif limit := optimizer.global_clipnorm:
        norm = tf.sqrt(sum_over_stages(squared_norms(gradients, variables), variables))
        scales = [global_scale(norm, limit)] * len(gradients)
        # Keras multiplies the dense gradient, with the sum of the rows.
        gradients = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
    elif limit := optimizer.clipvalue:
        return [
            None if gradient is None else tf.clip_by_value(gradient, -limit, limit)
            for gradient in gradients
        ]
    else:
        return list(gradients)
    return [times(gradient, scale) for gradient, scale in zip(gradients, scales, strict=True)]


def global_scale(norm: tf.Tensor, limit) -> tf.Tensor:
    """The factor that clips gradients to a global norm; NaN for a norm that is not finite, as in Keras."""
    return limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)


def sum_over_stages(squares: Sequence, variables: Sequence) -> tf.Tensor:
    """The sum of squared norms over all variables, including those of other stages."""
    stages = [layout_of(variable).stage for variable in variables]
    present = [pair for pair in zip(squares, stages, strict=True) if pair[0] is not None]
    zero = tf.constant(0.0)
    total = tf.add_n([zero, *(square for square, stage in present if stage is None)])
    pipeline = next((stage.group for stage in stages if stage is not None), None)
    if pipeline is None:
        return total
    own = [square for square, stage in present if stage is not None and stage.counts]
    return total + all_reduce(tf.add_n([zero, *own]), pipeline, name="norms")
