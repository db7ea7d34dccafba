"""Gradients quantized to 8 or 4 bits per number."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.addons.slow_links.compressor import MIN_ELEMENTS
from tfdist.addons.slow_links.two_step import BlockCompressor
from tfdist.utils import checks


class _Quantizer(BlockCompressor):
    #: The largest level. Levels are symmetric, so that zero is one of them.
    largest: int

    def __init__(self, block: int = 256, *, start_step: int = 10, min_elements: int = MIN_ELEMENTS):
        checks.integer("block", block, minimum=2, maximum=1 << 24)
        if block % 2:
            raise ValueError(
                f"`block` must be even: a byte may hold two numbers. Received: {block}."
            )
        super().__init__(block, start_step=start_step, min_elements=min_elements)

    def _levels(self, blocks: tf.Tensor, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Levels from -largest to largest, rounded up or down at random, and their unit."""
        unit = tf.reduce_max(tf.abs(blocks), axis=-1, keepdims=True) / self.largest
        exact = tf.math.divide_no_nan(blocks, unit)
        drawn = tf.random.stateless_uniform(tf.shape(blocks), seed)
        # A rounding error of the quotient must not exceed the largest level.
        levels = tf.clip_by_value(tf.floor(exact + drawn), -self.largest, self.largest)
        # A value that is not finite becomes NaN on all ranks, as it would without compression.
        return levels, tf.where(tf.math.is_finite(unit), unit, float("nan"))

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {"block": self.block, **super().get_config()}


class Int8(_Quantizer):
    """Numbers from -127 to 127, times a unit for each block, with stochastic rounding.

    A number is rounded up or down at random so that its expectation is exact. Alistarh et al., QSGD,
    arXiv:1610.02132; in blocks as in ZeRO++, arXiv:2306.10209.

    Args:
        block: The number of numbers that share a unit; even.
        start_step: The number of first steps that send gradients uncompressed.
        min_elements: Smaller gradients are never compressed.

    Raises:
        ValueError: An argument is out of range.
    """

    largest = 127

    def encode(self, blocks: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """See `BlockCompressor.encode`."""
        levels, unit = self._levels(blocks, seed)
        return {"levels": tf.cast(levels, tf.int8), "units": unit}

    def decode(self, payload: dict[str, tf.Tensor]) -> tf.Tensor:
        """See `BlockCompressor.decode`."""
        return tf.cast(payload["levels"], tf.float32) * payload["units"]


class Int4(_Quantizer):
    """As `Int8`, with numbers from -7 to 7, two to a byte.

    Args:
        block: The number of numbers that share a unit; even.
        start_step: The number of first steps that send gradients uncompressed.
        min_elements: Smaller gradients are never compressed.

    Raises:
        ValueError: An argument is out of range.
    """

    largest = 7

    def encode(self, blocks: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """See `BlockCompressor.encode`."""
        levels, unit = self._levels(blocks, seed)
        # From 1 to 15, in half a byte each.
        raised = tf.cast(levels + 8.0, tf.uint8)
        packed = tf.bitwise.bitwise_or(
            tf.bitwise.left_shift(raised[..., 0::2], tf.constant(4, tf.uint8)), raised[..., 1::2]
        )
        return {"levels": packed, "units": unit}

    def decode(self, payload: dict[str, tf.Tensor]) -> tf.Tensor:
        """See `BlockCompressor.decode`."""
        packed = payload["levels"]
        high = tf.bitwise.right_shift(packed, tf.constant(4, tf.uint8))
        low = tf.bitwise.bitwise_and(packed, tf.constant(15, tf.uint8))
        raised = tf.cast(tf.stack([high, low], axis=-1), tf.float32)
        shape = tf.concat([tf.shape(packed)[:-1], [self.block]], axis=0)
        return (tf.reshape(raised, shape) - 8.0) * payload["units"]
