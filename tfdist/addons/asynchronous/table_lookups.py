"""Embedding layers that read only the rows that they look up, and not their whole table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf

from tfdist.addons.asynchronous.strategies import overridden
from tfdist.backend.keras.private import all_layers


def tables(model: keras.Model) -> list[keras.layers.Embedding]:
    """The layers of a model whose tables no other operation reads whole.

    Keras' own `Embedding` without a regularizer, a constraint, LoRA or quantization.
    """
    return [
        layer
        for layer in all_layers(model)
        if type(layer) is keras.layers.Embedding
        and layer.built
        and layer.trainable
        and layer.embeddings_regularizer is None
        and layer.embeddings_constraint is None
        and not layer.lora_enabled
        and layer.quantization_mode is None
    ]


@contextlib.contextmanager
def looking_up(
    layers: Sequence[keras.layers.Embedding],
    before: Callable[[keras.Variable, tf.Tensor], None] = lambda table, ids: None,
) -> Iterator[None]:
    """Makes calls of the layers gather rows from their variables, in its context.

    Keras' `Embedding.call` reads the whole table first, which costs a copy of it in each step once
    its rows are updated individually.

    Args:
        layers: The layers.
        before: Called with a table and the rows that will be read.
    """

    def lookup(layer):
        def call(inputs):
            if isinstance(inputs, tf.SparseTensor | tf.RaggedTensor):
                raise NotImplementedError(
                    "An Embedding under an asynchronous strategy requires dense tensors of ids. "
                    f"Received: a {type(inputs).__name__} in {layer.name!r}. Convert it with "
                    "`.to_tensor()`."
                )
            ids = tf.convert_to_tensor(inputs)
            ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
            size = tf.cast(layer.input_dim, ids.dtype)
            ids = tf.where(ids < 0, ids + size, ids)  # As in Keras' `take`.
            table = layer.embeddings
            before(table, ids)
            return tf.cast(tf.gather(table.value, ids), layer.compute_dtype)

        return call

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(overridden(layer, "call", lookup(layer)))
        yield
