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
    """The approximation of low rank by a step of a power iteration.

    Of a gradient M, as an n x m matrix, and a matrix Q of m x rank from the step before: P = M Q, the
    mean over the ranks, its columns made orthonormal; Q' = M^T P, the mean over the ranks. All ranks
    take P Q'^T, for rank (n + m) numbers in two all-reduces, of which each rank's own part, P P^T M,
    is taken from its residual. See Vogels et al., arXiv:1905.13727.

    Args:
        rank: The rank of what is sent. 1, 2 and 4 are usual, up to 32 for language models. From
            min(n, m) on the gradient is exact.
        start_step: As many steps first travel whole. A tenth of the training is a safe choice.
        min_compression_rate: What is not made smaller by this factor travels whole.
        warm_start: Whether Q is that of the step before. Else it is drawn anew: worse, but nothing is
            kept.
        seed: Of the first Q; the same on all ranks.

    Raises:
        ValueError: An argument is out of its range.
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
        """Whether a gradient gets smaller by at least `min_compression_rate`."""
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
        """Rows, columns and rank of the matrix that stands for a gradient."""
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
    """The dims of an array as those of the matrix that is nearest to a square: the fewest sent."""
    cuts = [(math.prod(shape[:at]), math.prod(shape[at:])) for at in range(len(shape) + 1)]
    return min(cuts, key=sum)


def _as_matrix(tensor: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tensor, matrix_shape(tuple(tensor.shape)))


def _orthonormal(matrix: tf.Tensor) -> tf.Tensor:
    """An orthonormal basis of what the columns span, of the same shape.

    Columns that depend on others, as those of a gradient of zeros, get some direction: of it P^T M
    says how much there is, so nothing becomes wrong by it.
    """
    return tf.linalg.qr(matrix, full_matrices=False).q
