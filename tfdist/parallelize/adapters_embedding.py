"""Stock embeddings, split over the vocabulary in place."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf
from keras import ops

from tfdist.collectives import Group
from tfdist.collectives.mappings import gather_from_tensor_region, reduce_from_tensor_region
from tfdist.keras_internals.attributes import table_of
from tfdist.keras_internals.private import set_keras_mask
from tfdist.layers.embedding import own_rows, split_logits, stays_split
from tfdist.parallelize.adapters import Adapter, Part, same_dtype
from tfdist.sharding.weights import value_tensor

__all__ = ["EmbeddingAdapter", "ReversibleEmbeddingAdapter"]


class EmbeddingAdapter(Adapter):
    """Rows of a table by ids: a rank looks up those of its range, and the ranks' are summed.

    A vocabulary that does not divide is padded with rows that no id reaches.
    """

    stock = keras.layers.Embedding
    kinds = ("vocabulary",)

    @staticmethod
    def main(layer) -> list:
        """The table."""
        return [table_of(layer)]

    def _parts(self) -> list[Part]:
        return [self._part(table_of(self.layer), 0, None)]

    def _call(self, group: Group) -> Callable:
        layer = self.layer

        def call(inputs):
            found = tf.cast(
                own_rows(value_tensor(table_of(layer)), inputs, group), layer.compute_dtype
            )
            return reduce_from_tensor_region(found, group, name=layer.path)

        return call


class ReversibleEmbeddingAdapter(EmbeddingAdapter):
    """The same, and in reverse the logits of all ids: a rank computes its range, and they are joined."""

    stock = keras.layers.ReversibleEmbedding

    @staticmethod
    def main(layer) -> list:
        """The table, and that of the way back where it has one of its own."""
        return [table_of(layer)] + ([] if layer.tie_weights else [layer.reverse_embeddings])

    def _parts(self) -> list[Part]:
        parts = super()._parts()
        if not self.layer.tie_weights:
            parts.append(self._part(self.layer.reverse_embeddings, 1, None))
        return parts

    def _call(self, group: Group) -> Callable:
        layer = self.layer
        look_up = super()._call(group)

        def call(inputs, reverse=False):
            if reverse:
                return _reversed(layer, inputs, group)
            found = look_up(inputs)
            mask = keras.layers.Embedding.compute_mask(layer, inputs)
            if mask is not None:
                set_keras_mask(found, mask)
            return found

        return call


def _reversed(layer, inputs, group: Group):
    """`keras.layers.ReversibleEmbedding` from rows [..., output_dim] to logits."""
    if layer.tie_weights:
        kernel = tf.transpose(value_tensor(layer.embeddings))
    else:
        kernel = value_tensor(layer.reverse_embeddings)
    if layer.reverse_dtype is not None:
        inputs = ops.cast(inputs, layer.reverse_dtype)
        kernel = ops.cast(kernel, layer.reverse_dtype)
    inputs, kernel = same_dtype(inputs, kernel)
    logits = split_logits(layer, inputs, kernel, group, name=f"{layer.path}/logits")
    if layer.logit_soft_cap is not None:
        logits = ops.tanh(logits / layer.logit_soft_cap) * layer.logit_soft_cap
    if stays_split(layer):
        return logits
    return gather_from_tensor_region(logits, group, name=f"{layer.path}/logits")[
        ..., : layer.input_dim
    ]
