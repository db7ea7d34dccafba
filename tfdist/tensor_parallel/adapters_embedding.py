"""Stock embeddings, split over the vocabulary in place."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf
from keras import ops

from tfdist.backend.keras.attributes import table_of
from tfdist.backend.keras.private import set_keras_mask
from tfdist.collectives import Group
from tfdist.collectives.mappings import gather_from_region, reduce_from_region
from tfdist.layers.embedding import keeps_vocab_split, split_logits
from tfdist.layers.vocabulary import counted_from_start, own_ids, own_rows
from tfdist.sharding.layout import layout_of
from tfdist.sharding.weights import value_tensor
from tfdist.tensor_parallel.adapters import Adapter
from tfdist.tensor_parallel.prefill import dropped_logits, drops_logits
from tfdist.tensor_parallel.products import same_dtype


class EmbeddingAdapter(Adapter):
    """Rows of a table by ids: a rank looks up those of its range, and the ranks' results are summed.

    If the size of the vocabulary is not divisible by the group, it is padded with unused rows.
    """

    stock = keras.layers.Embedding
    kinds = ("vocabulary",)

    @staticmethod
    def main(layer) -> list:
        """The table."""
        return [table_of(layer)]

    def describe(self) -> None:
        """The table, and the variables of LoRA and quantization."""
        layer = self.layer
        self.partial = []
        split = [table_of(layer)]
        if layer.lora_enabled:
            split.append(layer.lora_embeddings_a)
            self.partial.append(layer.lora_embeddings_b)
        if layer.quantization_mode:
            split += [layer.embeddings_scale, getattr(layer, "embeddings_zero", None)]
        self.parts = [self._part(v, 0, None) for v in split if v is not None]

    def _cut(self, group: Group) -> None:
        super()._cut(group)
        if self.layer.quantization_mode:
            for name in ("embeddings_scale", "reverse_embeddings_scale"):
                _fill_padding(getattr(self.layer, name, None))

    def _call(self, group: Group) -> Callable:
        layer = self.layer

        def call(inputs):
            found = own_rows(value_tensor(table_of(layer)), inputs, group, layer.input_dim)
            found = tf.cast(found, layer.compute_dtype)
            if layer.lora_enabled:
                a = value_tensor(layer.lora_embeddings_a)
                through_a = own_rows(a, inputs, group, layer.input_dim)
                found += _lora(layer, through_a, value_tensor(layer.lora_embeddings_b))
            return reduce_from_region(found, group, name=layer.path)

        return call

    def _quantized_call(self, group: Group) -> Callable:
        layer = self.layer
        stock = layer.quantized_call

        def call(inputs):
            ids = counted_from_start(inputs, layer.input_dim)
            ids, own = own_ids(ids, table_of(layer).shape[0], group, layer.input_dim)
            found = stock(ids)
            found *= tf.cast(own[..., None], found.dtype)
            return reduce_from_region(found, group, name=layer.path)

        return call


class ReversibleEmbeddingAdapter(EmbeddingAdapter):
    """An embedding that also computes logits: a rank computes its range, and the ranges are joined."""

    stock = keras.layers.ReversibleEmbedding

    @staticmethod
    def main(layer) -> list:
        """The table, and that of the logits if it is separate."""
        return [table_of(layer)] + ([] if layer.tie_weights else [layer.reverse_embeddings])

    def describe(self) -> None:
        """The table, that of the logits, and the variables of LoRA and quantization."""
        super().describe()
        layer = self.layer
        if layer.tie_weights:
            return
        self.parts.append(self._part(layer.reverse_embeddings, 1, None))
        if layer.quantization_mode:
            for name in ("reverse_embeddings_scale", "reverse_embeddings_zero"):
                variable = getattr(layer, name, None)
                if variable is not None:
                    self.parts.append(self._part(variable, len(variable.shape) - 1, None))

    def _call(self, group: Group) -> Callable:
        layer = self.layer
        look_up = super()._call(group)

        def call(inputs, reverse=False):
            if reverse:
                return self._joined(_logits(layer, inputs, group), group)
            return _masked(layer, inputs, look_up(inputs))

        return call

    def _quantized_call(self, group: Group) -> Callable:
        layer = self.layer
        stock = layer.quantized_call
        look_up = super()._quantized_call(group)

        def call(inputs, reverse=False):
            if reverse:
                entered = self.entrance.enter(inputs, group, layer.path)
                return self._joined(stock(entered, reverse=True), group)
            return look_up(inputs)

        return call

    def _joined(self, logits, group: Group):
        layer = self.layer
        if keeps_vocab_split(layer):
            return logits
        if drops_logits():
            return dropped_logits(logits, layer.input_dim)
        logits = gather_from_region(logits, group, name=f"{layer.path}/logits")
        return logits[..., : layer.input_dim]


def _logits(layer, inputs, group: Group):
    """`keras.layers.ReversibleEmbedding` from rows [..., output_dim] to this rank's logits."""
    tied = layer.tie_weights
    kernel = value_tensor(table_of(layer) if tied else layer.reverse_embeddings)
    kernel = tf.transpose(kernel) if tied else kernel
    if tied and layer.lora_enabled:
        a, b = (value_tensor(v) for v in (layer.lora_embeddings_a, layer.lora_embeddings_b))
        kernel = tf.cast(kernel + tf.transpose(_lora(layer, a, b)), layer.compute_dtype)
    if layer.reverse_dtype is not None:
        inputs = ops.cast(inputs, layer.reverse_dtype)
        kernel = ops.cast(kernel, layer.reverse_dtype)
    inputs, kernel = same_dtype(inputs, kernel)
    logits = split_logits(layer, inputs, kernel, group, name=f"{layer.path}/logits")
    if layer.logit_soft_cap is not None:
        logits = ops.tanh(logits / layer.logit_soft_cap) * layer.logit_soft_cap
    return logits


def _lora(layer, through_a, b):
    term = (layer.lora_alpha / layer.lora_rank) * tf.matmul(through_a, b)
    return tf.cast(term, layer.compute_dtype)


def _masked(layer, inputs, found):
    mask = keras.layers.Embedding.compute_mask(layer, inputs)
    if mask is not None:
        set_keras_mask(found, mask)
    return found


def _fill_padding(scale) -> None:
    """Sets the scales of padding rows to one, because quantized values are divided by them."""
    if scale is None or layout_of(scale).slice is None:
        return
    value = tf.convert_to_tensor(scale.value)
    scale.assign(tf.where(value == 0, tf.ones_like(value), value))
