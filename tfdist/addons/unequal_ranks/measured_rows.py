"""Shares of rows that follow the measured speed of the ranks, within the limits of their memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.step.row_shares import RowShares, check_count
from tfdist.step.shares import MeasuredShares


class MeasuredRowShares(RowShares):
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

    def state(self) -> dict[str, Any]:
        """See `RowShares.state`."""
        speeds = None if self.speeds is None else list(self.speeds)
        return {"parts": list(self.parts), "speeds": speeds}

    def restore(self, state: dict[str, Any] | None) -> bool:
        """See `RowShares.restore`."""
        if state is None or len(state["parts"]) != len(self.parts):
            return False
        self.set_parts(state["parts"])
        self.speeds = None if state["speeds"] is None else tuple(state["speeds"])
        return True
