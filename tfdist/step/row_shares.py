"""The number of rows of a global batch for each rank, where ranks are not equally fast.

Shares are integer parts of `PARTS`, so that all ranks compute the same bounds regardless of rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.step.shares import PARTS, parts_of
from tfdist.utils import checks


def check_count(name: str, values: Sequence, num_ranks: int) -> None:
    """Checks that there is one value for each of the ranks that hold different rows.

    Raises:
        ValueError: There are more or fewer.
    """
    if len(values) != num_ranks:
        meaning = f"one number for each of the {num_ranks} rank(s) with different rows"
        raise checks.refuse(name, values, meaning)


class RowShares:
    """The shares of the ranks that hold different rows, which are the same on all of them.

    Args:
        shares: A positive number for each rank.
        num_ranks: The number of ranks that hold different rows.

    Raises:
        ValueError: The number of shares differs from the number of ranks.
    """

    def __init__(self, shares: Sequence[float], num_ranks: int):
        check_count("batch_shares", shares, num_ranks)
        self.parts = parts_of([float(share) for share in shares])
        self._bounds: Any = [0, *itertools.accumulate(self.parts)]

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the rows for each rank; the parts add up to 1."""
        return tuple(part / PARTS for part in self.parts)

    def row_range(self, rows, index: int) -> tuple[tf.Tensor, tf.Tensor]:
        """The rows [start, end) of a batch that currently belong to a rank.

        The number of rows of a rank differs from its share by less than one, unless it is limited by
        `MeasuredShares.max_rows`.

        Args:
            rows: The size of the batch.
            index: The rank, among those that hold different rows.
        """
        bounds = self.bounds_of(tf.cast(rows, tf.int64))
        return bounds[index], bounds[index + 1]

    def bounds_of(self, rows: tf.Tensor) -> tf.Tensor:
        """The begin of the rows of each rank, and the end of the last ones."""
        return (rows * self._bounds + PARTS // 2) // PARTS
