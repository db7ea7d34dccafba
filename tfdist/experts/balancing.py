"""Balance without a loss: a bias for each expert, which follows how often it was chosen."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.sharding.layout import update_layout
from tfdist.step.context import current_replica, role_of


class BiasState:
    """The bias of a layer's experts, and what it has to know for its next update.

    An expert that was chosen less often than the mean gets more of a bias, by a fixed rate, one that
    was chosen more often gets less. All is float32 and of the counts of all ranks, so it is the same
    on each of them, bit for bit.

    Args:
        layer: The layer.
        num_experts: Their number.
        rate: By how much an update moves a bias.
        steps: After how many training batches there is one.

    Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
    algorithm 1.
    """

    def __init__(self, layer: keras.layers.Layer, num_experts: int, rate: float, steps: int):
        def add(name, shape):
            state = layer.add_weight(
                name=name,
                shape=shape,
                dtype="float32",
                initializer="zeros",
                trainable=False,
                autocast=False,
            )
            update_layout(state, same_on_all_ranks=True)
            return state

        self._name = layer.name
        self._rate, self._steps = rate, steps
        self.bias = add("expert_bias", (num_experts,))
        self._counts = add("expert_counts", (num_experts,))
        self._passes = add("expert_passes", ())

    def update(self, counts: tf.Tensor) -> None:
        """Notes a training pass, and moves the bias at the end of the last one before an update.

        Args:
            counts: How often each expert was chosen on all ranks: float32, [num_experts].
        """
        counts = tf.convert_to_tensor(self._counts.value) + counts
        passes = tf.convert_to_tensor(self._passes.value) + 1.0
        bias = tf.convert_to_tensor(self.bias.value)
        is_last = passes >= float(self._steps * self._passes_of_a_batch())
        moved = bias + self._rate * tf.sign(tf.reduce_mean(counts) - counts)
        self.bias.assign(tf.where(is_last, moved, bias))
        self._counts.assign(tf.where(is_last, tf.zeros_like(counts), counts))
        self._passes.assign(tf.where(is_last, 0.0, passes))

    def _passes_of_a_batch(self) -> int:
        """The micro-batches of a pipeline's step.

        Raises:
            ValueError: The optimizer accumulates gradients of another number of batches.
        """
        replica = current_replica()
        step = None if replica is None else replica.step
        if step is None:
            return 1
        optimizer = getattr(step.model, "optimizer", None)
        accumulated = getattr(optimizer, "gradient_accumulation_steps", None) or 1
        if accumulated != self._steps:
            raise ValueError(
                "The bias of experts is updated when weights are: bias_update_steps is the "
                f"optimizer's gradient_accumulation_steps. Received: bias_update_steps={self._steps} "
                f"in `{self._name}`, gradient_accumulation_steps={accumulated}."
            )
        return role_of(step.model).num_microbatches
