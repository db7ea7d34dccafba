"""How evenly a layer's experts were used: counts of this rank's training tokens."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tfdist.backend.keras.private import all_layers


class ExpertUsage:
    """Counts of the choices that a layer has made in training since they were last read.

    They are no weights: they are not saved, and each rank has those of its own tokens.

    Args:
        num_experts: Their number.
    """

    def __init__(self, num_experts: int):
        with tf.init_scope():
            # The last counts those that were dropped.
            self._counts = tf.Variable(tf.zeros([num_experts + 1], tf.float64), trainable=False)

    def add(self, counts: tf.Tensor, dropped: tf.Tensor) -> None:
        """Adds a training pass.

        Args:
            counts: How often each expert was chosen: [num_experts].
            dropped: How many of these choices were dropped.
        """
        parts = [tf.cast(counts, tf.float64), tf.cast(dropped, tf.float64)[None]]
        self._counts.assign_add(tf.concat(parts, axis=0))

    def take(self) -> np.ndarray:
        """The counts, the dropped choices last, which begin anew."""
        found = self._counts.numpy()
        self._counts.assign(tf.zeros_like(self._counts))
        return found


def usages_of(model: keras.Model) -> dict[str, ExpertUsage]:
    """The counts of a model's layers of experts, by the layers' paths."""
    found = {layer.path: getattr(layer, "expert_usage", None) for layer in all_layers(model)}
    return {path: usage for path, usage in found.items() if isinstance(usage, ExpertUsage)}
