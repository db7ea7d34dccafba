"""The norm of the gradients of a step, over ranks that hold parts of them or copies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.mesh import Mesh
from tfdist.sharding.layout import layout_of


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
