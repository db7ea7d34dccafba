"""Counts of how often a layer's experts were chosen by this rank's training tokens."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist.backend import devices


class ExpertUsage:
    """Counts of a layer's choices in training since the last read.

    They are not weights: they are not saved, and each rank counts only its tokens.

    Args:
        num_experts: The number of experts.
    """

    def __init__(self, num_experts: int):
        with tf.init_scope(), devices.on_host():
            # The last entry counts the dropped choices.
            self._counts = tf.Variable(tf.zeros([num_experts + 1], tf.float64), trainable=False)

    def add(self, counts: tf.Tensor, dropped: tf.Tensor) -> None:
        """Adds a training pass.

        Args:
            counts: How often each expert was chosen: [num_experts].
            dropped: The number of these choices that were dropped.
        """
        parts = [tf.cast(counts, tf.float64), tf.cast(dropped, tf.float64)[None]]
        self._counts.assign_add(tf.concat(parts, axis=0))

    def take(self) -> np.ndarray:
        """Returns the counts, the dropped choices last, and resets them."""
        found = self._counts.numpy()
        self._counts.assign(tf.zeros_like(self._counts))
        return found
