"""Embedding and output head over a vocabulary that is split over the tensor axis."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import history, table_of
from tfdist.collectives import Group
from tfdist.collectives.mappings import (
    column_parallel_matmul,
    copy_to_region,
    gather_from_region,
    gather_from_sequence_region,
    linear,
    reduce_from_region,
    reduce_scatter_to_sequence_region,
)
from tfdist.layers.dense import check_divides
from tfdist.layers.initializers import initializer
from tfdist.layers.losses import takes_split_logits
from tfdist.sharding.weights import add_split_weight, tensor_group, value_tensor
from tfdist.step.context import current_step
from tfdist.utils import checks


@keras.saving.register_keras_serializable(package="tfdist")
class VocabParallelEmbedding(keras.layers.Embedding):
    """`keras.layers.Embedding` of which each tensor rank holds a range of the vocabulary.

    A rank looks up the ids of its range, and the ranks' rows are summed. A vocabulary that does
    not divide by the tensor axis is padded with rows that no id reaches. Where the tensor axis is
    1 or there is no strategy, this is `keras.layers.Embedding`.

    Args:
        input_dim: The size of the vocabulary.
        output_dim: The width of a row.
        sequence_parallel: Whether the output is this rank's slice of dim 1.
        **kwargs: As for `keras.layers.Embedding`.
    """

    splits_tokens = True

    def __init__(
        self, input_dim: int, output_dim: int, *, sequence_parallel: bool = False, **kwargs
    ):
        input_dim = checks.integer("input_dim", input_dim, minimum=1)
        output_dim = checks.integer("output_dim", output_dim, minimum=1)
        super().__init__(input_dim, output_dim, **kwargs)
        self.sequence_parallel = checks.boolean("sequence_parallel", sequence_parallel)
        self._group = tensor_group()

    def build(self, input_shape=None):
        """Adds this rank's rows of the table."""
        if self._group is None:
            super().build(input_shape)
            return
        table_of.set(
            self,
            add_split_weight(
                self,
                (self.input_dim, self.output_dim),
                0,
                axis=self._group,
                name="embeddings",
                initializer=self.embeddings_initializer,
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
            ),
        )
        self.built = True

    def call(self, inputs, reverse=False):
        """Ids [batch, time] to rows [..., output_dim]; with `reverse` rows to logits.

        The logits are those of a `VocabParallelHead` whose kernel is the table, transposed.
        """
        if reverse:
            table = tf.cast(value_tensor(self.embeddings), self.compute_dtype)
            return _logits(self, inputs, tf.transpose(table), self.input_dim)
        if self._group is None:
            return super().call(inputs)
        found = own_rows(value_tensor(table_of(self)), inputs, self._group)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_region(found, self._group, name=self.name)
        return reduce_from_region(found, self._group, name=self.name)

    def compute_output_spec(self, inputs, reverse=False):
        """The shape that this rank's output has."""
        shape = list(inputs.shape)
        if reverse:
            return keras.KerasTensor(_logits_shape(self, shape, self.input_dim), self.compute_dtype)
        if self._group is not None and self.sequence_parallel and shape[1] is not None:
            check_divides("the sequence", shape[1], self._group, self)
            shape[1] //= self._group.size
        return keras.KerasTensor((*shape, self.output_dim), self.compute_dtype)

    def get_config(self):
        """The configuration, the same on any mesh."""
        return {**super().get_config(), "sequence_parallel": self.sequence_parallel}


@keras.saving.register_keras_serializable(package="tfdist")
class VocabParallelHead(keras.layers.Layer):
    """Logits over a vocabulary of which each tensor rank computes its range.

    While a model trains or is evaluated with a loss that takes split logits, they stay split:
    a rank never holds them all. In every other place (`predict`, a call of one's own, another
    loss or metric) they are joined. A vocabulary that does not divide by the tensor axis is
    padded, and the padding is cut off or, where the logits stay split, left out by the loss.

    Args:
        vocabulary_size: The number of logits.
        sequence_parallel: Whether the input is this rank's slice of dim 1.
        kernel_initializer: Of the kernel, of shape [features, vocabulary_size].
        **kwargs: As for `keras.layers.Layer`.
    """

    splits_tokens = True

    def __init__(
        self,
        vocabulary_size: int,
        *,
        sequence_parallel: bool = False,
        kernel_initializer="glorot_uniform",
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.vocabulary_size = checks.integer("vocabulary_size", vocabulary_size, minimum=1)
        self.sequence_parallel = checks.boolean("sequence_parallel", sequence_parallel)
        self.kernel_initializer = initializer("kernel_initializer", kernel_initializer)
        self._group = tensor_group()

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
        """[batch, time, features] to [batch, time, vocabulary_size], or this rank's range of it."""
        kernel = value_tensor(self.kernel)
        return _logits(self, inputs, kernel, self.vocabulary_size)

    def compute_output_shape(self, input_shape):
        """The shape of joined logits."""
        return _logits_shape(self, input_shape, self.vocabulary_size)

    def get_config(self):
        """The configuration, the same on any mesh."""
        return {
            **super().get_config(),
            "vocabulary_size": self.vocabulary_size,
            "sequence_parallel": self.sequence_parallel,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
        }


def own_rows(table, ids, group: Group):
    """The rows of ids [...] in this rank's range of a table, and zeros for those of others'."""
    ids, own = own_ids(ids, table.shape[0], group)
    found = tf.gather(table, ids)
    return found * tf.cast(own[..., None], found.dtype)


def own_ids(ids, rows: int, group: Group) -> tuple:
    """The places of ids [...] in this rank's range of `rows`, 0 for others'; and which are its own."""
    ids = tf.cast(ids, tf.int32) - group.rank * rows
    own = tf.logical_and(ids >= 0, ids < rows)
    return tf.where(own, ids, 0), own


def _logits(layer, inputs, kernel, vocabulary_size: int):
    group = layer._group
    if group is None:
        return linear(inputs, kernel)
    axis = 1 if layer.sequence_parallel else None
    logits = split_logits(layer, inputs, kernel, group, axis, name=f"{layer.name}/logits")
    if stays_split(layer):
        return logits
    return gather_from_region(logits, group, name=f"{layer.name}/logits")[..., :vocabulary_size]


def split_logits(
    layer, inputs, kernel, group: Group, sequence_axis: int | None = None, *, name: str
):
    """This rank's columns of the logits, as `column_parallel_matmul` gives them.

    Where the loss takes them in chunks, it finds a product of its own behind them.
    """
    if getattr(getattr(_model_under_way(), "loss", None), "chunk_size", None) is None or not (
        stays_split(layer)
    ):
        return column_parallel_matmul(inputs, kernel, group, sequence_axis=sequence_axis, name=name)
    if sequence_axis is None:
        inputs = copy_to_region(inputs, group, name=name)
    else:
        inputs = gather_from_sequence_region(inputs, group, sequence_axis, name=name)
    return linear(inputs, kernel)


def _model_under_way():
    step = current_step()
    return None if step is None else step.model


def stays_split(layer) -> bool:
    """Whether this is the last layer of a model under way whose loss takes split logits."""
    model = _model_under_way()
    outputs = getattr(model, "outputs", None) or []
    return (
        len(outputs) == 1 and history(outputs[0]).operation is layer and takes_split_logits(model)
    )


def _logits_shape(layer, input_shape, vocabulary_size: int) -> tuple:
    shape = [*input_shape[:-1], vocabulary_size]
    if layer._group is not None and layer.sequence_parallel and shape[1] is not None:
        shape[1] *= layer._group.size
    return tuple(shape)
