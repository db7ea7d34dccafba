"""Keras variables whose memory is another: Keras' hooks for that have private names."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import stored_value

#: Under which a `tf.train.Checkpoint` has the value of any variable.
_SAVED = "VARIABLE_VALUE"


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

    @property
    def _shared_name(self):
        return stored_value(self)._shared_name

    def _serialize_to_tensors(self):
        # Keras' own asks `value` for all of this, which is a tensor here.
        return {_SAVED: tf.convert_to_tensor(self.value)}

    def _restore_from_tensors(self, restored_tensors):
        self.assign(restored_tensors[_SAVED])


def renew(variable: keras.Variable, value) -> None:
    """Gives a variable new memory with a value, maybe of another shape; `assign` keeps the old."""
    with tf.init_scope():
        variable._initialize(value)
