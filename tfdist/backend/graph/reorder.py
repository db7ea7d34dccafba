"""A permutation of rows, whose gradient is the inverse permutation."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.custom_gradient import custom_gradient


def reorder(rows: tf.Tensor, order: tf.Tensor) -> tf.Tensor:
    """Reorders rows: row `order[i]` moves to place i.

    The gradient of `tf.gather` would be a sparse gradient, which becomes a sum over rows.

    Args:
        rows: The rows, of shape [n, ...].
        order: A permutation of 0 to n - 1, int32.
    """

    @custom_gradient
    def gather(x):
        with devices.on_host():
            back = tf.math.invert_permutation(order)
        return tf.gather(x, order), lambda dy: tf.gather(dy, back)

    return gather(rows)
