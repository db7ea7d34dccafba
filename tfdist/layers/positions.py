"""Learned absolute positions."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.context_parallel import check_whole_slices
from tfdist.layers.initializers import initializer as get_initializer
from tfdist.sharding.layout import update_layout
from tfdist.sharding.weights import tensor_group, value_tensor
from tfdist.step.context import current_tokens
from tfdist.step.token_split import TokenSplit
from tfdist.utils import checks


@keras.saving.register_keras_serializable(package="tfdist")
class PositionEmbedding(keras.layers.Layer):
    """Adds a learned vector to each position of a sequence.

    Args:
        max_length: The longest sequence.
        initializer: Of the table, of shape [max_length, width].
        sequence_parallel: Whether the input is this tensor rank's slice of dim 1.
        **kwargs: As for `keras.layers.Layer`.
    """

    splits_tokens = True

    def __init__(
        self, max_length: int, *, initializer="uniform", sequence_parallel: bool = False, **kwargs
    ):
        super().__init__(**kwargs)
        self.max_length = checks.integer("max_length", max_length, minimum=1)
        self.initializer = get_initializer("initializer", initializer)
        self.sequence_parallel = checks.boolean("sequence_parallel", sequence_parallel)
        self._group = tensor_group()
        check_whole_slices(self, self.sequence_parallel)

    def build(self, input_shape):
        """Adds the table.

        Raises:
            ValueError: The sequence is longer than the table.
        """
        group = self._group if self.sequence_parallel else None
        parts = 1 if group is None else group.size
        if input_shape[1] is not None and input_shape[1] * parts > self.max_length:
            raise ValueError(
                f"A sequence has at most max_length={self.max_length} positions. Received: "
                f"{input_shape[1] * parts} in `{self.name}`."
            )
        self.table = self.add_weight(
            name="table", shape=(self.max_length, input_shape[-1]), initializer=self.initializer
        )
        if group is not None:
            update_layout(self.table, partial_over=group)
        self.built = True

    def call(self, inputs):
        """[batch, time, width] to the same shape."""
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
        said = f"A sequence has at most max_length={self.max_length} positions in `{self.name}`"
        tf.debugging.assert_less_equal(tokens.total, self.max_length, said)
        # Slices, and no lookup, so that the gradient is dense.
        return tokens.take(value_tensor(self.table), axis=0)

    def compute_output_shape(self, input_shape):
        """That of the input."""
        return input_shape

    def get_config(self):
        """The configuration, the same on any mesh."""
        return {
            **super().get_config(),
            "max_length": self.max_length,
            "initializer": keras.initializers.serialize(self.initializer),
            "sequence_parallel": self.sequence_parallel,
        }
