"""1-bit SGD: the sign of each number, and a scale for each block."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.addons.slow_links.compressor import MIN_ELEMENTS
from tfdist.addons.slow_links.two_step import BlockCompressor
from tfdist.utils import checks

#: The positions of the bits in a byte.
_PLACES = np.arange(8, dtype="uint8")


class OneBit(BlockCompressor):
    """Sends signs, and the mean of the absolute values of each block.

    That scale has the least loss: it is the projection of a block on its signs. Seide et al., "1-Bit
    Stochastic Gradient Descent", Interspeech 2014; with both residuals as in Tang et al.,
    arXiv:2102.02888. An entry that never has a gradient, such as the row of a position that no sequence
    reaches, gets one nevertheless, and a later one cancels it: 1 bit cannot represent zero.

    Args:
        block: The number of numbers that share a scale; a multiple of 8.
        start_step: The number of first steps that send gradients uncompressed; with Adam, a tenth of the
            training or more, so that its second moments are estimated first.
        min_elements: Smaller gradients are never compressed.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self, block: int = 1024, *, start_step: int = 10, min_elements: int = MIN_ELEMENTS
    ):
        checks.integer("block", block, minimum=8, maximum=1 << 24)
        if block % 8:
            raise ValueError(
                f"`block` must be a multiple of 8: a byte holds 8 signs. Received: {block}."
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
