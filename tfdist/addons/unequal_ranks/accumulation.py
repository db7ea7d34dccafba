"""Updates of fewer micro-steps than an optimizer accumulates, in a number that changes during training.

Keras makes `gradient_accumulation_steps`, M, a constant when it traces a step: an update is made when
the number of micro-steps is a multiple of M, from the sum of gradients over M. For an update of k
micro-steps, the number is increased by M - k after each update, and gradients are multiplied by M / k.
Keras still counts one update, so that Adam's bias corrections are correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.backend.keras.attributes import micro_steps
from tfdist.gradients.stage import GradientContext, GradientItem, GradientStage, Position


class Accumulation(GradientStage):
    """The number of micro-steps of an optimizer's updates.

    Args:
        optimizer: A built optimizer that accumulates gradients.
        steps: The initial number.
    """

    position = Position.UPDATE

    def __init__(self, optimizer: Any, steps: int):
        self.optimizer = optimizer
        self.most = int(optimizer.gradient_accumulation_steps)
        with tf.init_scope(), tf.device("/CPU:0"):
            self._steps = tf.Variable(steps, trainable=False, dtype=tf.int64, name="micro_steps")

    @property
    def steps(self) -> int:
        """The current number."""
        return int(self._steps.numpy())

    @property
    def is_between_updates(self) -> bool:
        """Whether no gradient is accumulated now. Eager only."""
        return self._done() % self.most == (self.most - self.steps) % self.most

    def begin(self) -> None:
        """Sets the micro-steps of an optimizer's first update; later calls have no effect."""
        counted = micro_steps(self.optimizer)
        if self._done() == 0:
            counted.assign(self.most - self.steps)

    def set_steps(self, steps: int, *, restored: bool = False) -> None:
        """Changes the number, between two updates.

        Args:
            steps: From 1 to `most`.
            restored: Whether the optimizer's count already includes them, as from a checkpoint.
        """
        if not restored:
            micro_steps(self.optimizer).assign_add(self.steps - steps)
        self._steps.assign(steps)

    def __call__(self, items: Sequence[GradientItem], context: GradientContext) -> list:
        """Scales Keras' sum over `most` to the mean over the micro-steps of an update."""
        if context.optimizer is not self.optimizer:
            return [item.gradient for item in items]
        factor = self.most / tf.cast(self._steps.read_value(), tf.float32)

        def scale(gradient):
            own = tf.cast(factor, gradient.dtype)
            if isinstance(gradient, tf.IndexedSlices):
                return tf.IndexedSlices(
                    gradient.values * own, gradient.indices, gradient.dense_shape
                )
            return gradient * own

        return [scale(item.gradient) for item in items]

    def end_step(self) -> None:
        """Adjusts the count after each micro-step, in its graph."""
        counted = micro_steps(self.optimizer)
        done = tf.convert_to_tensor(counted.value)
        is_over = tf.equal(done % self.most, 0)
        more = self.most - tf.cast(self._steps.read_value(), done.dtype)
        counted.assign_add(tf.where(is_over, more, tf.zeros_like(more)))

    def _done(self) -> int:
        return int(micro_steps(self.optimizer).numpy())
