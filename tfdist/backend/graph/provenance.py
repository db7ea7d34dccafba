"""What is read off a tensor besides its values: its mask, and the logits it was computed from.

A cross-entropy of probabilities loses precision where they saturate, so Keras looks behind them: it
takes the tensor's `_keras_logits` where an activation of Keras left them, and else, in a graph, the
input of the Softmax or Sigmoid operation that made the tensor. An identity or a slice in between
would hide both, and the loss would be another one.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.backend.graph.products import note_source
from tfdist.backend.keras.attributes import keras_logits
from tfdist.backend.keras.private import get_keras_mask, set_keras_mask


def with_provenance(
    function: Callable[..., tf.Tensor], *tensors: tf.Tensor, mask: bool = True
) -> tf.Tensor:
    """Returns `function(*tensors)`, behind which Keras finds what it finds behind the tensors.

    Args:
        function: Leaves rows as they are: an identity, a choice of rows, a concatenation of rows. It
            is called with the tensors' logits and masks too, where all of them have some.
        *tensors: Tensors of any shape, such as the outputs of a model.
        mask: Whether Keras masks are carried over; `function` then takes boolean tensors too.
    """
    logits = [keras_logits(tensor, None) for tensor in tensors]
    activation = _activation_of(tensors)
    moved_logits = None
    if activation is not None:
        sources = [tensor.op.inputs[0] for tensor in tensors]
        moved_sources = function(*sources)
        moved = activation(moved_sources)
        if all(own is source for own, source in zip(logits, sources, strict=True)):
            moved_logits = moved_sources
    else:
        moved = function(*tensors)
    if moved_logits is None and all(own is not None for own in logits):
        moved_logits = function(*logits)
    if moved_logits is not None:
        keras_logits.set(moved, moved_logits)
    note_source(moved, function, *tensors)
    masks = [get_keras_mask(tensor) for tensor in tensors] if mask else [None]
    if all(found is not None for found in masks):
        set_keras_mask(moved, function(*masks))
    return moved


def _activation_of(tensors) -> Callable[[tf.Tensor], tf.Tensor] | None:
    """The activation that made tensors of a graph, if it is one that Keras looks for."""
    if any(tf.executing_eagerly() or not hasattr(tensor, "op") for tensor in tensors):
        return None
    kinds = {tensor.op.type for tensor in tensors}
    if kinds == {"Softmax"}:
        return lambda logits: tf.raw_ops.Softmax(logits=logits)
    if kinds == {"Sigmoid"}:
        return lambda logits: tf.raw_ops.Sigmoid(x=logits)
    return None
