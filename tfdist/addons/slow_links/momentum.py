"""Optimizers whose momentum is sent compressed, in place of gradients."""

from __future__ import annotations

import abc

import tensorflow as tf


class CompressedMomentum(abc.ABC):
    """An optimizer that determines which tensor is compressed for a gradient.

    Attributes:
        freeze_step: The step from which its momentum is compressed.
    """

    freeze_step: int

    @abc.abstractmethod
    def to_send(self, gradient: tf.Tensor, variable) -> tf.Tensor:
        """The tensor that is compressed for a rank's gradient, of the same shape.

        Args:
            gradient: The gradient, whose mean over the ranks is the global one.
            variable: Its variable.
        """

    @abc.abstractmethod
    def received(self, mean: tf.Tensor, variable) -> tf.Tensor:
        """The global gradient with which an update sets the momentum to the received one.

        Args:
            mean: The mean over the ranks of what they have sent.
            variable: The variable.
        """
