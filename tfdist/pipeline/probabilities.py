"""Outputs that are probabilities are sent between stages as their logits.

A loss of probabilities searches for their logits, because it would lose precision otherwise. A tensor
that was received from another rank has no history to search.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import keras_logits
from tfdist.backend.keras.calls import Call

#: Layers whose output is the result of their activation.
_LAYERS = (
    keras.layers.Activation,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Dense,
    keras.layers.EinsumDense,
)


def activation_of(call: Call) -> Callable[[tf.Tensor], tf.Tensor] | None:
    """The softmax or sigmoid at the end of a call; None if there is none."""
    operation = call.operation
    if isinstance(operation, keras.layers.Softmax):
        return keras.activations.softmax if operation.axis == -1 and len(call.reads) == 1 else None
    found = operation.activation if isinstance(operation, _LAYERS) else None
    return found if found in (keras.activations.softmax, keras.activations.sigmoid) else None


def logits_of(tensor: tf.Tensor, activation: Callable) -> tf.Tensor:
    """The logits of an activation, as recorded by Keras, or else by the inverse of the activation."""
    logits = keras_logits(tensor, None)
    if logits is not None:
        return logits
    log = tf.math.log(tensor)
    return log if activation is keras.activations.softmax else log - tf.math.log1p(-tensor)
