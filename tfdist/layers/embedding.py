"""Embedding and output head over a vocabulary that is split over the tensor axis."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.keras.attributes import history, table_of
from tfdist.backend.keras.calls import calls_of, owns_call
from tfdist.collectives import Group
from tfdist.collectives.mappings import (
    column_parallel_matmul,
    gather_from_region,
    linear,
    whole_input,
)
from tfdist.layers.base import SplitStockLayer, TensorParallelLayer
from tfdist.layers.initializers import initializer
from tfdist.layers.losses import takes_split_logits
from tfdist.layers.vocabulary import own_rows
from tfdist.sharding.weights import add_split_weight, value_tensor
from tfdist.step.context import current_step, role_of
from tfdist.utils import checks


@keras.saving.register_keras_serializable(package="tfdist")
class VocabParallelEmbedding(SplitStockLayer, keras.layers.Embedding):
    """`keras.layers.Embedding` whose vocabulary is split over the tensor ranks.

    A rank looks up the ids of its range, and the ranks' rows are summed. If the size of the vocabulary is
    not a multiple of the size of the tensor axis, it is padded with unused rows. If the tensor axis has one
    rank, or without a strategy, this is `keras.layers.Embedding`.

    Args:
        input_dim: The size of the vocabulary.
        output_dim: The width of a row.
        sequence_parallel: Whether the output is this rank's slice of dim 1.
        **kwargs: As for `keras.layers.Embedding`.
    """

    def __init__(
        self, input_dim: int, output_dim: int, *, sequence_parallel: bool = False, **kwargs
    ):
        input_dim = checks.integer("input_dim", input_dim, minimum=1)
        output_dim = checks.integer("output_dim", output_dim, minimum=1)
        super().__init__(input_dim, output_dim, sequence_parallel=sequence_parallel, **kwargs)

    def build(self, input_shape=None):
        """Adds this rank's rows of the table."""
        if self._group is None:
            super().build(input_shape)
            return
        shape = (self.input_dim, self.output_dim)
        rules = self._rules("embeddings")
        table = add_split_weight(self, shape, 0, axis=self._group, name="embeddings", **rules)
        table_of.set(self, table)
        self.built = True

    def call(self, inputs, reverse=False):
        """Maps ids [batch, time] to rows [..., output_dim], or with `reverse` rows to logits.

        The logits are those of a `VocabParallelHead` whose kernel is the table, transposed.
        """
        if reverse:
            table = tf.cast(value_tensor(self.embeddings), self.compute_dtype)
            return _logits(self, inputs, tf.transpose(table), self.input_dim)
        if self._group is None:
            return super().call(tf.cast(inputs, devices.index_dtype()))
        found = own_rows(value_tensor(table_of(self)), inputs, self._group, self.input_dim)
        return self._reduce(found, self._group)

    def compute_output_spec(self, inputs, reverse=False):
        """The shape and dtype of this rank's output."""
        if reverse:
            shape = (*self._shape_of_whole(inputs.shape)[:-1], self.input_dim)
        else:
            shape = (*self._shape_of_slice(inputs.shape), self.output_dim)
        return keras.KerasTensor(shape, self.compute_dtype)


@keras.saving.register_keras_serializable(package="tfdist")
class VocabParallelHead(TensorParallelLayer):
    """Logits over a vocabulary that is split over the tensor ranks.

    While a model is trained or evaluated with a loss that supports split logits, they stay split: no rank
    has all of them. Otherwise (`predict`, a direct call, another loss or metric) they are gathered. If the
    size of the vocabulary is not a multiple of the size of the tensor axis, it is padded; the padding is
    removed or, if the logits stay split, ignored by the loss.

    Args:
        vocabulary_size: The number of logits.
        sequence_parallel: Whether the input is this rank's slice of dim 1.
        kernel_initializer: For the kernel, of shape [features, vocabulary_size].
        **kwargs: As for `keras.layers.Layer`.
    """

    _arguments = ("vocabulary_size", "kernel_initializer")

    def __init__(
        self,
        vocabulary_size: int,
        *,
        sequence_parallel: bool = False,
        kernel_initializer="glorot_uniform",
        **kwargs,
    ):
        super().__init__(sequence_parallel=sequence_parallel, **kwargs)
        self.vocabulary_size = checks.integer("vocabulary_size", vocabulary_size, minimum=1)
        self.kernel_initializer = initializer("kernel_initializer", kernel_initializer)

    def build(self, input_shape):
        """Adds this rank's columns of the kernel."""
        self.kernel = add_split_weight(
            self,
            (input_shape[-1], self.vocabulary_size),
            1,
            axis=self._group,
            name="kernel",
            initializer=self.kernel_initializer,
        )
        self.built = True

    def call(self, inputs):
        """Maps [batch, time, features] to [batch, time, vocabulary_size], or this rank's range of it."""
        kernel = value_tensor(self.kernel)
        return _logits(self, inputs, kernel, self.vocabulary_size)

    def compute_output_shape(self, input_shape):
        """The shape of the gathered logits."""
        return (*self._shape_of_whole(input_shape)[:-1], self.vocabulary_size)


def _logits(layer: TensorParallelLayer, inputs, kernel, vocabulary_size: int):
    group, name = layer._group, f"{layer.name}/logits"
    if group is None:
        return linear(inputs, kernel)
    logits = split_logits(layer, inputs, kernel, group, layer._sequence_axis, name=name)
    if keeps_vocab_split(layer):
        return logits
    return gather_from_region(logits, group, name=name)[..., :vocabulary_size]


def split_logits(
    layer, inputs, kernel, group: Group, sequence_axis: int | None = None, *, name: str
):
    """This rank's columns of the logits, as `column_parallel_matmul` returns them.

    For a loss in chunks they are a plain product, whose factors the loss finds in the graph.
    """
    loss = getattr(getattr(current_step(), "model", None), "loss", None)
    if getattr(loss, "chunk_size", None) is None or not keeps_vocab_split(layer):
        return column_parallel_matmul(inputs, kernel, group, sequence_axis=sequence_axis, name=name)
    return linear(whole_input(inputs, group, sequence_axis, name=name), kernel)


def keeps_vocab_split(layer) -> bool:
    """Whether this is the last layer of the current step's model, whose loss supports split logits.

    A layer that makes logits in several calls joins those of each, since something else uses the others; so do
    one with an activity regularizer, which is a function of all, and one of a model that overrides `call`.
    """
    model = getattr(current_step(), "model", None)
    outputs = getattr(model, "outputs", None) or []
    if len(outputs) != 1 or history(outputs[0]).operation is not layer:
        return False
    whole = role_of(model).whole_model or model
    if owns_call(whole) or layer.activity_regularizer is not None:
        return False
    widths = [c.makes[0].shape[-1] for c in calls_of(whole)[0] if c.operation is layer]
    return widths.count(outputs[0].shape[-1]) == 1 and takes_split_logits(model)
