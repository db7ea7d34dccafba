"""Optimizers whose momentum travels compressed, in place of gradients."""

from __future__ import annotations

import abc

import tensorflow as tf


class CompressedMomentum(abc.ABC):
    """An optimizer that has a say in what is compressed of a gradient.

    Attributes:
        freeze_step: From which step on it wants its momentum compressed.
    """

    freeze_step: int

    @abc.abstractmethod
    def to_send(self, gradient: tf.Tensor, variable) -> tf.Tensor:
        """What is compressed of a rank's gradient, of its shape.

        Args:
            gradient: The gradient, whose mean over the ranks is the global one.
            variable: Its variable.
        """

    @abc.abstractmethod
    def received(self, mean: tf.Tensor, variable) -> tf.Tensor:
        """The global gradient by which an update makes of the momentum what was received.

        Args:
            mean: The mean over the ranks of what they have sent.
            variable: The variable.
        """
