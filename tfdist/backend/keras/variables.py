"""Keras variables with a different storage, through private hooks of Keras."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tfdist.backend.keras.attributes import stored_shape, stored_value
from tfdist.utils.temporary import attributes_set

#: The key of a variable's value in a `tf.train.Checkpoint`.
_SAVED = "VARIABLE_VALUE"


class HookedVariable(keras.Variable):
    """A Keras variable whose subclasses define how a value is stored."""

    def store(self, value) -> None:
        """Creates the storage, with the first value."""
        with _with_shape_of(value, self):
            super()._initialize(value)

    def overwrite(self, value) -> None:
        """Assigns a value whose shape was checked by `assign`."""
        super()._direct_assign(value)

    def _initialize(self, value):
        self.store(value)

    def _direct_assign(self, value):
        self.overwrite(value)

    @property
    def _shared_name(self):
        return stored_value(self)._shared_name

    def _serialize_to_tensors(self):
        # Keras' implementation calls a method of `value`, which is a tensor here.
        return {_SAVED: tf.convert_to_tensor(self.value)}

    def _restore_from_tensors(self, restored_tensors):
        self.assign(restored_tensors[_SAVED])


def renew(variable: keras.Variable, value) -> None:
    """Creates a new storage of a variable with a value, whose shape may differ, unlike in `assign`."""
    with tf.init_scope(), _with_shape_of(value, variable):
        variable._initialize(value)


def _with_shape_of(value, variable: keras.Variable) -> contextlib.AbstractContextManager[None]:
    """A context in which Keras creates the storage in the shape of a value, if it has one.

    From 3.16 it would create it in that of the variable.
    """
    if callable(value):
        return contextlib.nullcontext()
    shape = value.shape if hasattr(value, "shape") else np.shape(value)
    return attributes_set(variable, **{stored_shape.name: tuple(shape)})
