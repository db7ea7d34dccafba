"""The number of rows of a global batch for each rank, where ranks are not equally fast.

Shares are integer parts of `PARTS`, so that all ranks compute the same bounds regardless of rounding.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.step.shares import PARTS, MeasuredShares, parts_of
from tfdist.utils import checks


class RowShares:
    """The shares of the ranks that hold different rows, which are the same on all of them.

    Args:
        shares: "measured", a `MeasuredShares`, or a positive number for each rank.
        num_ranks: The number of ranks that hold different rows.

    Raises:
        ValueError: The number of shares, or of limits, differs from the number of ranks.
    """

    def __init__(self, shares: str | MeasuredShares | Sequence[float], num_ranks: int):
        self.measured: MeasuredShares | None = None
        #: The measured speed of each rank, in rows per second; None before the first measurement.
        self.speeds: tuple[float, ...] | None = None
        self._num_ranks = num_ranks
        limits: Any = None
        if isinstance(shares, str | MeasuredShares):
            self.measured = MeasuredShares() if isinstance(shares, str) else shares
            limits, shares = self.measured.max_rows, [1.0] * num_ranks
        for name, values in (("max_rows", limits), ("batch_shares", shares)):
            if values is not None and not isinstance(values, int) and len(values) != num_ranks:
                meaning = f"one number for each of the {num_ranks} rank(s) with different rows"
                raise checks.refuse(name, values, meaning)
        if limits is None or isinstance(limits, int):
            limits = [limits or math.inf] * num_ranks
        #: The user's limit on the rows of each rank; infinite if there is none.
        self.most_rows = [float(limit) for limit in limits]
        self.parts = parts_of([float(share) for share in shares])
        with tf.device("/CPU:0"):
            self._bounds = tf.Variable(
                [0, *itertools.accumulate(self.parts)],
                trainable=False,
                dtype=tf.int64,
                name="row_bounds",
            )

    @property
    def shares(self) -> tuple[float, ...]:
        """The part of the rows for each rank; the parts add up to 1."""
        return tuple(part / PARTS for part in self.parts)

    def row_range(self, rows, index: int) -> tuple[tf.Tensor, tf.Tensor]:
        """The rows [start, end) of a batch that currently belong to a rank.

        The number of rows of a rank differs from its share by less than one, unless it is limited by
        `max_rows`.

        Args:
            rows: The size of the batch.
            index: The rank, among those that hold different rows.
        """
        rows = tf.cast(rows, tf.int64)
        bounds = self._bounds_of(rows)
        if self.measured is not None and self.measured.max_rows is not None:
            sizes = self._limited(rows, bounds[1:] - bounds[:-1])
            bounds = tf.concat([tf.zeros([1], tf.int64), tf.cumsum(sizes)], axis=0)
        return bounds[index], bounds[index + 1]

    def _bounds_of(self, rows: tf.Tensor) -> tf.Tensor:
        return (rows * self._bounds + PARTS // 2) // PARTS

    def _limited(self, rows: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        """Sizes within the limits; excess rows are assigned to the first ranks below their limits.

        Computed with integers, so that all ranks get the same result. Rows beyond the sum of the limits are
        shared as if there were no limits.
        """
        most = tf.constant([int(limit) for limit in self.most_rows], tf.int64)
        own = tf.minimum(sizes, most)
        room = most - own
        over = rows - tf.reduce_sum(own)
        own += tf.clip_by_value(over - tf.cumsum(room, exclusive=True), 0, room)
        bounds = self._bounds_of(rows - tf.reduce_sum(own))
        return own + bounds[1:] - bounds[:-1]

    def set_parts(self, parts: Sequence[int]) -> None:
        """Changes the shares between two steps; all ranks must do so before the same step.

        Raises:
            ValueError: They are not valid shares of this number of ranks.
        """
        parts = tuple(int(part) for part in parts)
        if len(parts) != self._num_ranks or sum(parts) != PARTS or min(parts) < 0:
            raise ValueError(
                f"Shares must be {self._num_ranks} integers that add up to {PARTS}. Received: {parts}."
            )
        self._bounds.assign([0, *itertools.accumulate(parts)])
        self.parts = parts

    def state(self) -> dict[str, Any] | None:
        """The state for checkpoints; None if shares are fixed."""
        if self.measured is None:
            return None
        speeds = None if self.speeds is None else list(self.speeds)
        return {"parts": list(self.parts), "speeds": speeds}

    def restore(self, state: dict[str, Any] | None) -> bool:
        """Restores the result of `state`; returns whether it was for the same number of ranks."""
        if self.measured is None or state is None or len(state["parts"]) != self._num_ranks:
            return False
        self.set_parts(state["parts"])
        self.speeds = None if state["speeds"] is None else tuple(state["speeds"])
        return True
