"""The norm of the gradients of a step, as ranks add it up that hold parts of it, or the same."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.mesh import Mesh
from tfdist.sharding.layout import layout_of


def square_of(gradients: Sequence) -> tf.Tensor:
    """The squared norm of gradients that one process has whole: a float64 scalar.

    Args:
        gradients: Tensors, IndexedSlices or None.
    """
    return square_parts([(gradient, 1) for gradient in gradients])


def weighted_square(gradients: Sequence, variables: Sequence, mesh: Mesh) -> tf.Tensor:
    """This rank's part of the squared norm of all gradients: those of all ranks add up to it.

    Args:
        gradients: Tensors, IndexedSlices or None, after they were reduced.
        variables: Their variables.
        mesh: The mesh.

    Returns:
        A float64 scalar.
    """
    pairs = zip(gradients, variables, strict=True)
    return square_parts([(gradient, _holders(variable, mesh)) for gradient, variable in pairs])


def square_parts(parts: Sequence[tuple]) -> tf.Tensor:
    """The squared norms of gradients, each over the number of ranks that count it; 0 for none."""
    found = []
    for gradient, holders in parts:
        if gradient is None or not holders:
            continue
        values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
        square = tf.reduce_sum(tf.square(tf.cast(values, tf.float32)))
        found.append(tf.cast(square, tf.float64) / holders)
    return tf.add_n(found) if found else tf.constant(0.0, tf.float64)


def _holders(variable, mesh: Mesh) -> int:
    """How many ranks hold what this one does of a gradient; 0 where another one counts it."""
    layout = layout_of(variable)
    if not layout.counts:
        return 0
    shard = layout.gradient_shard
    split = set() if shard is None else set(shard.group.axes)
    axes = [axis for axis in layout.replicated_axes(mesh) if axis not in split]
    return math.prod(mesh.shape[axis] for axis in axes)
