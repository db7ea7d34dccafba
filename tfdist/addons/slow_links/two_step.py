"""Elementwise compressors: each rank sums its part, and all ranks gather the parts."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.addons.slow_links.compressor import MIN_ELEMENTS, Compressor, State
from tfdist.addons.slow_links.packing import exchange_packed
from tfdist.collectives import Group


class BlockCompressor(Compressor):
    """Compresses blocks of numbers independently.

    Every rank sends each other rank that rank's part of the gradient, compressed; sums what it received
    for its own part; compresses the mean, and sends it to all. So both exchanges are compressed, for any
    number of ranks. The loss of the second compression has a separate residual, on the rank of the part
    (Seide et al. 2014; Tang et al., arXiv:1905.05957).

    Args:
        block: The number of numbers that share a scale.
        start_step: As in `Compressor`.
        min_elements: As in `Compressor`.
    """

    def __init__(self, block: int, *, start_step: int = 10, min_elements: int = MIN_ELEMENTS):
        super().__init__(start_step=start_step, min_elements=min_elements)
        self.block = block

    @abc.abstractmethod
    def encode(self, blocks: tf.Tensor, seed: tf.Tensor) -> dict[str, tf.Tensor]:
        """Compresses blocks.

        Args:
            blocks: Numbers of shape [..., block], float32.
            seed: The seed of random numbers: int64 of shape [2].

        Returns:
            Tensors whose first dims are those of `blocks`.
        """

    @abc.abstractmethod
    def decode(self, payload: dict[str, tf.Tensor]) -> tf.Tensor:
        """The decompressed blocks, of shape [..., block]."""

    def compress(self, tensor: tf.Tensor, state: State, step: tf.Tensor) -> Any:
        """The encoded blocks of one part."""
        del state
        return self.encode(self._parts(tensor, 1), tf.stack([step, tf.zeros_like(step)]))

    def decompress(self, payload: Any, shape: tuple[int, ...]) -> tf.Tensor:
        """The tensor of its encoded parts."""
        flat = tf.reshape(self.decode(payload), [-1])
        return tf.reshape(flat[: math.prod(shape)], shape)

    def initial_state(self, shape: tuple[int, ...], num_ranks: int) -> dict[str, np.ndarray]:
        """The residual of the means of this rank's part, as blocks."""
        blocks = -(-math.prod(shape) // (num_ranks * self.block))
        return {"mean_residual": np.zeros((blocks, self.block), "float32")}

    def exchange(
        self,
        tensors: Sequence[tf.Tensor],
        states: Sequence[State],
        step: tf.Tensor,
        group: Group,
        name: str,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """See `Compressor.exchange`."""
        shapes = [tuple(tensor.shape) for tensor in tensors]
        parts = [self._parts(tensor, group.size) for tensor in tensors]
        # The random numbers differ between ranks, steps and gradients.
        draws = [
            tf.stack([step, tf.constant(place * group.size + group.rank, tf.int64)])
            for place in range(len(tensors))
        ]
        sent = [self.encode(part, seed) for part, seed in zip(parts, draws, strict=True)]
        own = [self.decompress(payload, shape) for payload, shape in zip(sent, shapes, strict=True)]
        received = _exchange("all_to_all", sent, group, f"{name}/parts")
        means = [
            tf.reduce_mean(self.decode(payload), axis=0)
            + tf.convert_to_tensor(state["mean_residual"])
            for payload, state in zip(received, states, strict=True)
        ]
        seeds = [seed + tf.constant([0, 1 << 32], tf.int64) for seed in draws]
        encoded = [self.encode(mean[None], seed) for mean, seed in zip(means, seeds, strict=True)]
        for mean, payload, state in zip(means, encoded, states, strict=True):
            state["mean_residual"].assign(mean - self.decode(payload)[0])
        gathered = _exchange("all_gather", encoded, group, f"{name}/means")
        reduced = [self.decompress(p, shape) for p, shape in zip(gathered, shapes, strict=True)]
        return reduced, own

    def _parts(self, tensor: tf.Tensor, count: int) -> tf.Tensor:
        """The numbers, padded with zeros, as blocks of `count` parts: [count, blocks, block]."""
        flat = tf.reshape(tensor, [-1])
        size = math.prod(tensor.shape)
        padded = tf.pad(flat, [[0, -size % (count * self.block)]])
        return tf.reshape(padded, [count, -1, self.block])


def _exchange(collective: str, payloads: list[dict], group: Group, name: str) -> list[dict]:
    rows = exchange_packed(collective, tf.nest.flatten(payloads), group, name)
    return tf.nest.pack_sequence_as(payloads, rows)
