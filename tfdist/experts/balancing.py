"""Load balancing without a loss: a bias for each expert, adjusted by how often it was chosen."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.sharding.layout import update_layout
from tfdist.sharding.updates import unwrapped
from tfdist.step.context import current_step, role_of


class BiasState:
    """The selection bias of a layer's experts, and the counts for its next update.

    An update increases the bias of an expert that was chosen less often than the mean by a fixed rate, and
    decreases that of one that was chosen more often. It is computed in float32 from the counts of all ranks,
    so it is bitwise identical on all ranks.

    Args:
        layer: The layer.
        num_experts: The number of experts.
        rate: The change of a bias in an update.
        steps: The number of training batches per update.

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
        """Adds the counts of a training pass, and updates the bias after the last pass of `steps` batches.

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
        """The number of training passes per batch: the micro-batches of a pipeline's step.

        Raises:
            ValueError: The optimizer accumulates gradients over another number of batches.
        """
        step = current_step()
        if step is None:
            return 1
        optimizer = unwrapped(getattr(step.model, "optimizer", None))
        accumulated = getattr(optimizer, "gradient_accumulation_steps", None) or 1
        if accumulated != self._steps:
            raise ValueError(
                "bias_update_steps must equal the optimizer's gradient_accumulation_steps, so that the "
                f"bias is updated with the weights. Received: bias_update_steps={self._steps} in "
                f"`{self._name}`, gradient_accumulation_steps={accumulated}."
            )
        return role_of(step.model).num_microbatches
