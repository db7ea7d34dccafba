"""PowerSGD: gradients as products of two thin matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.addons.slow_links.compressor import Compressor, State
from tfdist.addons.slow_links.packing import exchange_packed
from tfdist.collectives import Group
from tfdist.utils import checks


class PowerSGD(Compressor):
    """Low-rank approximation by one step of a power iteration.

    Of a gradient M, as an n x m matrix, and a matrix Q of m x rank from the step before: P = M Q, the
    mean over the ranks, its columns made orthonormal; Q' = M^T P, the mean over the ranks. All ranks
    use P Q'^T, for rank (n + m) numbers in two all-reduces, of which each rank's own part, P P^T M,
    is subtracted from its residual. See Vogels et al., arXiv:1905.13727.

    Args:
        rank: The rank of the approximation. 1, 2 and 4 are usual, up to 32 for language models. From
            min(n, m) on the gradient is exact.
        start_step: The number of first steps that send gradients uncompressed. A tenth of the training
            is a safe choice.
        min_compression_rate: A gradient that is not reduced by this factor is not compressed.
        warm_start: Whether Q is that of the step before. Otherwise it is drawn in each step, which is
            less exact, but needs no state.
        seed: The seed of the first Q; the same on all ranks.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        rank: int = 1,
        *,
        start_step: int = 10,
        min_compression_rate: float = 2.0,
        warm_start: bool = True,
        seed: int = 0,
    ):
        super().__init__(start_step=start_step)
        checks.integer("rank", rank, minimum=1, maximum=1 << 16)
        checks.number("min_compression_rate", min_compression_rate, above=0, maximum=1e9)
        checks.boolean("warm_start", warm_start)
        checks.integer("seed", seed, minimum=0, maximum=2**31 - 1)
        self.rank, self.min_compression_rate = rank, float(min_compression_rate)
        self.warm_start, self.seed = warm_start, seed

    def selects(self, shape: tuple[int, ...]) -> bool:
        """Whether compression reduces a gradient by at least `min_compression_rate`."""
        rows, columns, rank = self._dims(shape)
        return (rows + columns) * rank * self.min_compression_rate <= rows * columns

    def initial_state(self, shape: tuple[int, ...], num_ranks: int) -> dict[str, np.ndarray]:
        """The first Q, of shape [m, rank]."""
        del num_ranks
        if not self.warm_start:
            return {}
        _, columns, rank = self._dims(shape)
        drawn = np.random.default_rng(self.seed).normal(size=(columns, rank))
        return {"factor": drawn.astype("float32")}

    def compress(self, tensor: tf.Tensor, state: State, step: tf.Tensor) -> Any:
        """The first factor, P, before the ranks' mean is taken: of shape [n, rank]."""
        _, columns, rank = self._dims(tuple(tensor.shape))
        if self.warm_start:
            factor = tf.convert_to_tensor(state["factor"])
        else:
            seed = tf.stack([tf.constant(self.seed, tf.int64), step])
            factor = tf.random.stateless_normal([columns, rank], seed)
        return tf.matmul(_as_matrix(tensor), factor)

    def decompress(self, payload: Any, shape: tuple[int, ...]) -> tf.Tensor:
        """The product of two factors."""
        first, second = payload
        return tf.reshape(tf.matmul(first, second, transpose_b=True), shape)

    def exchange(
        self,
        tensors: Sequence[tf.Tensor],
        states: Sequence[State],
        step: tf.Tensor,
        group: Group,
        name: str,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """See `Compressor.exchange`."""

        def mean(factors: list, what: str) -> list:
            ones = [factor[None] for factor in factors]
            rows = exchange_packed("mean", ones, group, f"{name}/{what}")
            return [row[0] for row in rows]

        pairs = list(zip(tensors, states, strict=True))
        first = mean([self.compress(tensor, state, step) for tensor, state in pairs], "first")
        first = [_orthonormal(factor) for factor in first]
        second = [
            tf.matmul(_as_matrix(tensor), factor, transpose_a=True)
            for tensor, factor in zip(tensors, first, strict=True)
        ]
        means = mean(second, "second")
        if self.warm_start:
            for state, factor in zip(states, means, strict=True):
                state["factor"].assign(factor)
        reduced, own = (
            [
                self.decompress(factors, tuple(tensor.shape))
                for *factors, tensor in zip(first, each, tensors, strict=True)
            ]
            for each in (means, second)
        )
        return reduced, own

    def _dims(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Rows, columns and rank of the matrix of a gradient."""
        rows, columns = matrix_shape(shape)
        return rows, columns, min(self.rank, rows, columns)

    def get_config(self) -> dict[str, Any]:
        """The arguments of the constructor."""
        return {
            "rank": self.rank,
            "start_step": self.start_step,
            "min_compression_rate": self.min_compression_rate,
            "warm_start": self.warm_start,
            "seed": self.seed,
        }


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """The shape of an array as a matrix that is closest to a square, which sends the least."""
    cuts = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(len(shape) + 1)]
    return min(cuts, key=sum)


def _as_matrix(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tensor, matrix_shape(tuple(tensor.shape)))


def _orthonormal(matrix: tf.Tensor) -> tf.Tensor:
    """An orthonormal basis of the span of the columns, of the same shape.

    Linearly dependent columns, such as those of a zero gradient, get an arbitrary direction; P^T M
    gives its coefficient, so the product stays correct.
    """
    return tf.linalg.qr(matrix, full_matrices=False).q
