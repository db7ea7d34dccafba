"""1-bit SGD: of each number the sign, of each block a scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.addons.slow_links.compressor import MIN_ELEMENTS
from tfdist.addons.slow_links.two_step import BlockCompressor
from tfdist.utils import checks

#: Those of the bits in a byte.
_PLACES = np.arange(8, dtype="uint8")


class OneBit(BlockCompressor):
    """Signs, times the mean of the absolute values of their block.

    That scale loses the least of a block: it is the projection on its signs. Seide et al., "1-Bit
    Stochastic Gradient Descent", Interspeech 2014; with both residuals as in Tang et al.,
    arXiv:2102.02888. An entry that never has a gradient, as the row of a position that no sequence
    reaches, gets one all the same, and loses it again with a later one: 1 bit cannot say zero.

    Args:
        block: How many numbers have a scale in common; a multiple of 8.
        start_step: As many steps first travel whole; a tenth of the training or more with Adam, whose
            second moments are to be there first.
        min_elements: Smaller gradients always travel whole.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self, block: int = 1024, *, start_step: int = 10, min_elements: int = MIN_ELEMENTS
    ):
        checks.integer("block", block, minimum=8, maximum=1 << 24)
        if block % 8:
            raise ValueError(
                f"`block` is a multiple of 8: a byte holds 8 signs. Received: {block}."
            )
        super().__init__(block, start_step=start_step, min_elements=min_elements)

    def encode(self, blocks: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """See `BlockCompressor.encode`: bytes of 8 signs each, and a scale."""
        del seed
        eights = tf.concat([tf.shape(blocks)[:-1], [self.block // 8, 8]], axis=0)
        bits = tf.reshape(tf.cast(blocks > 0, tf.uint8), eights)
        packed = tf.reduce_sum(tf.bitwise.left_shift(bits, _PLACES), axis=-1)
        return {"signs": packed, "scales": tf.reduce_mean(tf.abs(blocks), axis=-1, keepdims=True)}

    def decode(self, payload: dict[str, tf.Tensor]) -> tf.Tensor:
        """See `BlockCompressor.decode`."""
        packed, scales = payload["signs"], payload["scales"]
        bits = tf.bitwise.bitwise_and(tf.bitwise.right_shift(packed[..., None], _PLACES), 1)
        signs = 2.0 * tf.cast(bits, tf.float32) - 1.0
        shape = tf.concat([tf.shape(packed)[:-1], [self.block]], axis=0)
        return tf.reshape(signs, shape) * scales

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {"block": self.block, **super().get_config()}
