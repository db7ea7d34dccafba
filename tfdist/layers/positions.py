"""Learned absolute position embeddings."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.backend import devices
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

    def call(self, inputs):
        """Maps [batch, time, width] to the same shape."""
        tokens = current_tokens()
        if tokens is not None:
            return inputs + self._own_vectors(tokens)
        time = tf.shape(inputs)[1] if inputs.shape[1] is None else inputs.shape[1]
        start = 0
        if self._group is not None and self.sequence_parallel:
            start = self._group.rank * time
        return inputs + value_tensor(self.table)[start : start + time]

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
