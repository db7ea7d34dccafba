"""The metadata of a tensor that Keras uses: its mask, and the logits from which it was computed.

A cross-entropy of probabilities loses precision if they saturate, so Keras uses their logits: the
tensor's `_keras_logits` if an activation of Keras has set them, and otherwise, in a graph, the input of
the Softmax or Sigmoid operation that computed the tensor. An identity or a slice in between would hide
both, and the loss would be different.
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
    """Returns `function(*tensors)`, with the tensors' logits and masks for Keras.

    Args:
        function: A function that does not change rows: an identity, a selection of rows, a concatenation
            of rows. It is also called with the tensors' logits and masks, if all of them have some.
        *tensors: Tensors of any shape, such as the outputs of a model.
        mask: Whether Keras masks are preserved; `function` must then accept boolean tensors too.
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
    """The activation that computed tensors of a graph, if Keras recognizes it."""
    if tf.executing_eagerly():
        return None
    kinds = {tensor.op.type if hasattr(tensor, "op") else "" for tensor in tensors}
    if kinds == {"Softmax"}:
        return lambda logits: tf.raw_ops.Softmax(logits=logits)
    if kinds == {"Sigmoid"}:
        return lambda logits: tf.raw_ops.Sigmoid(x=logits)
    return None
