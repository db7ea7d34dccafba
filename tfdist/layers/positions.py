"""Learned absolute position embeddings."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.context_parallel import check_whole_slices
from tfdist.layers.base import TensorParallelLayer
from tfdist.layers.initializers import initializer as get_initializer
from tfdist.sharding.weights import value_tensor
from tfdist.step.context import current_tokens
from tfdist.step.token_split import TokenSplit
from tfdist.utils import checks


@keras.saving.register_keras_serializable(package="tfdist")
class PositionEmbedding(TensorParallelLayer):
    """Adds a learned vector to each position of a sequence.

    Args:
        max_length: The maximum length of a sequence.
        initializer: For the table, of shape [max_length, width].
        sequence_parallel: Whether the input is this tensor rank's slice of dim 1.
        **kwargs: As for `keras.layers.Layer`.
    """

    _arguments = ("max_length", "initializer")

    def __init__(
        self, max_length: int, *, initializer="uniform", sequence_parallel: bool = False, **kwargs
    ):
        super().__init__(sequence_parallel=sequence_parallel, **kwargs)
        self.max_length = checks.integer("max_length", max_length, minimum=1)
        self.initializer = get_initializer("initializer", initializer)
        check_whole_slices(self, self.sequence_parallel)

    def build(self, input_shape):
        """Adds the table.

        Raises:
            ValueError: The sequence is longer than the table.
        """
        time = self._shape_of_whole(input_shape)[1]
        if time is not None and time > self.max_length:
            raise ValueError(
                f"A sequence must have at most max_length={self.max_length} positions. Received: "
                f"{time} in `{self.name}`."
            )
        self.table = self.add_weight(
            name="table", shape=(self.max_length, input_shape[-1]), initializer=self.initializer
        )
        self._mark_partial(self.table)
        self.built = True

    def call(self, inputs, document_starts=None):
        """Maps [batch, time, width] to the same shape.

        Args:
            inputs: Shape [batch, time, width].
            document_starts: None, or ints of shape [batch, tokens of the whole sequence]: the place in the
                row of the first token of each token's document, where positions begin again. On a context
                axis, dim 1 has this rank's tokens.
        """
        tokens = current_tokens()
        if document_starts is not None:
            return inputs + self._vectors_in_documents(inputs, document_starts, tokens)
        if tokens is not None:
            return inputs + self._own_vectors(tokens)
        time = tf.shape(inputs)[1] if inputs.shape[1] is None else inputs.shape[1]
        start = 0
        if self._group is not None and self.sequence_parallel:
            start = self._group.rank * time
        return inputs + value_tensor(self.table)[start : start + time]

    def _vectors_in_documents(self, inputs, document_starts, tokens: TokenSplit | None):
        """The vectors of the places of tokens in their documents."""
        starts = tf.convert_to_tensor(document_starts)
        places = tf.range(tf.shape(starts)[1]) if tokens is None else tokens.positions()
        places = tf.cast(places, starts.dtype) - starts
        if self._group is not None and self.sequence_parallel:
            time = tf.shape(inputs)[1]
            places = places[:, self._group.rank * time :][:, :time]

        @custom_gradient
        def gathered(table):
            def gradient(dy):
                # A dense sum, of a size that does not depend on the places.
                rows = tf.reshape(dy, [-1, dy.shape[-1]])
                return tf.math.unsorted_segment_sum(rows, tf.reshape(places, [-1]), table.shape[0])

            return tf.gather(table, places), gradient

        return gathered(value_tensor(self.table))

    def _own_vectors(self, tokens: TokenSplit):
        """The vectors of this rank's tokens of a sequence."""
        message = (
            f"A sequence must have at most max_length={self.max_length} positions in `{self.name}`"
        )
        with devices.on_host():
            tf.debugging.assert_less_equal(tokens.total, self.max_length, message)
        # Slices and not a lookup, so that the gradient is dense.
        return tokens.take(value_tensor(self.table), axis=0)

    def compute_output_shape(self, input_shape):
        """The shape of the input."""
        return input_shape
