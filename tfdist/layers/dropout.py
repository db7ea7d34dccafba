"""Dropout for activations that are replicated or split over the tensor axis."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.collectives import Group
from tfdist.sharding.weights import tensor_group
from tfdist.utils import checks

#: Odd, and different from the stride between the ranks of the data axis.
_STRIDE = 0x85EBCA6B


def own_seed(seed, group: Group):
    """A drawn seed, of shape [2], plus an offset for the rank, so that seeds differ within the group."""
    offset = (group.rank * _STRIDE) % (1 << 31)
    return seed + tf.constant([0, offset], dtype=seed.dtype)


@keras.saving.register_keras_serializable(package="tfdist")
class Dropout(keras.layers.Dropout):
    """`keras.layers.Dropout` for activations that may be split over the tensor axis.

    Tensor ranks have the same samples. If the activation is replicated, all drop the same entries; if it
    is split, each rank draws different random numbers for its slice.

    Args:
        rate: The fraction of entries that are dropped.
        split: Whether the input is this rank's slice.
        **kwargs: As for `keras.layers.Dropout`.
    """

    splits_tokens = True

    def __init__(self, rate: float, *, split: bool = False, **kwargs):
        super().__init__(checks.number("rate", rate, minimum=0, maximum=1), **kwargs)
        self.split = checks.boolean("split", split)
        self._group = tensor_group()

    def call(self, inputs, training=False):
        """Maps any shape to the same shape."""
        if not training or not self.rate:
            return inputs
        if self._group is None or not self.split:
            return super().call(inputs, training=training)
        seed = own_seed(self.seed_generator.next(), self._group)
        return tf.nn.experimental.stateless_dropout(
            inputs, rate=self.rate, seed=tf.cast(seed, tf.int32), noise_shape=self.noise_shape
        )

    def get_config(self):
        """The configuration, which is the same on any mesh."""
        return {**super().get_config(), "split": self.split}
