"""Outputs that are probabilities travel from stage to stage as the logits that they come from.

A loss of probabilities looks for the logits behind them, since it would lose precision without. On
another rank there is nothing behind a tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import keras_logits
from tfdist.backend.keras.calls import Call

#: Layers whose output is their activation of something.
_LAYERS = (
    keras.layers.Activation,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Dense,
    keras.layers.EinsumDense,
)


def activation_of(call: Call) -> Callable[[tf.Tensor], tf.Tensor] | None:
    """The softmax or sigmoid that ends a call, if one does."""
    operation = call.operation
    if isinstance(operation, keras.layers.Softmax):
        return keras.activations.softmax if operation.axis == -1 and len(call.reads) == 1 else None
    if not isinstance(operation, _LAYERS):
        return None
    found = operation.activation
    return found if found in (keras.activations.softmax, keras.activations.sigmoid) else None


def logits_of(tensor: tf.Tensor, activation: Callable) -> tf.Tensor:
    """What an activation was taken of, as Keras has noted it or else by its inverse."""
    logits = keras_logits(tensor, None)
    if logits is not None:
        return logits
    log = tf.math.log(tensor)
    return log if activation is keras.activations.softmax else log - tf.math.log1p(-tensor)
