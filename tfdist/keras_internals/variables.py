"""Keras variables whose memory is another: Keras' hooks for that have private names."""

from __future__ import annotations

import keras
import tensorflow as tf

__all__ = ["HookedVariable", "renew"]


class HookedVariable(keras.Variable):
    """A Keras variable that says itself what it stores of a value."""

    def store(self, value) -> None:
        """Makes the memory, with its first value."""
        super()._initialize(value)

    def overwrite(self, value) -> None:
        """Assigns a value, of which `assign` has checked the shape."""
        super()._direct_assign(value)

    def _initialize(self, value):
        self.store(value)

    def _direct_assign(self, value):
        self.overwrite(value)


def renew(variable: keras.Variable, value) -> None:
    """Gives a variable new memory with a value, maybe of another shape; `assign` keeps the old."""
    with tf.init_scope():
        variable._initialize(value)
