"""Shares of rows that follow the measured speed of the ranks, within the limits of their memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.sharding.kept import KeptState
from tfdist.step.row_shares import RowShares, check_count
from tfdist.step.shares import PARTS, MeasuredShares
from tfdist.utils import checks


class MeasuredRowShares(RowShares, KeptState):
    """Row shares that are equal at first, and change by `Balancing`.

    Args:
        measured: The user's settings.
        num_ranks: The number of ranks that hold different rows.

    Attributes:
        measured: The settings.
        speeds: The measured speed of each rank, in rows per second; None before the first measurement.
        most_rows: The user's limit on the rows of each rank; infinite if there is none.

    Raises:
        ValueError: The number of limits differs from the number of ranks.
    """

    name = "batch_shares"

    def __init__(self, measured: MeasuredShares, num_ranks: int):
        limits: Any = measured.max_rows
        if isinstance(limits, Sequence):
            check_count("max_rows", limits, num_ranks)
        else:
            limits = [limits or math.inf] * num_ranks
        self.measured = measured
        self.speeds: tuple[float, ...] | None = None
        self.most_rows = [float(limit) for limit in limits]
        super().__init__([1.0] * num_ranks, num_ranks)
        with tf.device("/CPU:0"):
            # A step that was traced reads the shares of the moment.
            self._bounds = tf.Variable(
                self._bounds, trainable=False, dtype=tf.int64, name="row_bounds"
            )

    def set_parts(self, parts: Sequence[int]) -> None:
        """Changes the shares between two steps; all ranks must do so before the same step.

        Raises:
            ValueError: They are not valid shares of this number of ranks.
        """
        parts = tuple(int(part) for part in parts)
        if len(parts) != len(self.parts) or sum(parts) != PARTS or min(parts) < 0:
            raise ValueError(
                f"Shares must be {len(self.parts)} integers that add up to {PARTS}. Received: {parts}."
            )
        self._bounds.assign([0, *itertools.accumulate(parts)])
        self.parts = parts

    def bounds_of(self, rows: tf.Tensor) -> tf.Tensor:
        """As those of `RowShares`, but excess rows are assigned to the first ranks below their limits.

        Computed with integers, so that all ranks get the same result. Rows beyond the sum of the limits are
        shared as if there were no limits.
        """
        bounds = super().bounds_of(rows)
        if self.measured.max_rows is None:
            return bounds
        most = tf.constant([int(limit) for limit in self.most_rows], tf.int64)
        own = tf.minimum(bounds[1:] - bounds[:-1], most)
        room = most - own
        over = rows - tf.reduce_sum(own)
        own += tf.clip_by_value(over - tf.cumsum(room, exclusive=True), 0, room)
        more = super().bounds_of(rows - tf.reduce_sum(own))
        sizes = own + more[1:] - more[:-1]
        return tf.concat([tf.zeros([1], tf.int64), tf.cumsum(sizes)], axis=0)

    def values(self, *, in_epoch: bool) -> dict[str, Any]:
        """See `KeptState.values`."""
        speeds = None if self.speeds is None else list(self.speeds)
        return {"parts": list(self.parts), "speeds": speeds}

    def restore(self, values: Any) -> None:
        """See `KeptState.restore`; on a different number of ranks nothing is restored."""
        try:
            parts, speeds = list(values["parts"]), values["speeds"]
            if speeds is not None:
                speeds = checks.numbers_of("speeds", speeds, above=0)
            is_right = all(type(part) is int and part >= 0 for part in parts)
            is_right &= sum(parts) == PARTS and (speeds is None or len(speeds) == len(parts))
        except (KeyError, TypeError, ValueError):
            is_right = False
        if not is_right:
            raise ValueError(
                f"Shares of rows must be as `values` returns them. Received: {values!r:.200}."
            )
        if len(parts) == len(self.parts):
            self.set_parts(parts)
            self.speeds = speeds
