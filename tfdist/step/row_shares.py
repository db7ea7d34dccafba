"""How many rows of a global batch each rank gets, where ranks are not equally fast.

Shares are integer parts of `PARTS`, so that all ranks compute the same bounds whatever their
processors round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.step.shares import PARTS, MeasuredShares, parts_of
from tfdist.utils import checks


class RowShares:
    """The shares of the ranks that hold different rows, as all of them know them.

    Args:
        shares: "measured", a `MeasuredShares`, or a positive number for each rank.
        num_ranks: How many ranks hold different rows.

    Raises:
        ValueError: There is another number of shares, or of limits, than of ranks.
    """

    def __init__(self, shares: str | MeasuredShares | Sequence[float], num_ranks: int):
        self.measured: MeasuredShares | None = None
        #: By rank the measured speed, in rows per second; None before the first measurement.
        self.speeds: tuple[float, ...] | None = None
        if isinstance(shares, str | MeasuredShares):
            self.measured = MeasuredShares() if isinstance(shares, str) else shares
            limits = self.measured.max_rows
            if limits is not None and not isinstance(limits, int):
                _check_length("max_rows", limits, num_ranks)
            first = parts_of([1.0] * num_ranks)
        else:
            _check_length("batch_shares", shares, num_ranks)
            first = parts_of([float(share) for share in shares])
        self._num_ranks = num_ranks
        with tf.device("/CPU:0"):
            self._bounds = tf.Variable(
                _sums(first), trainable=False, dtype=tf.int64, name="row_bounds"
            )
        self.parts = first

    @property
    def shares(self) -> tuple[float, ...]:
        """Of each rank the part of the rows; they add up to 1."""
        return tuple(part / PARTS for part in self.parts)

    def row_range(self, rows, index: int) -> tuple[tf.Tensor, tf.Tensor]:
        """The rows [start, end) of a batch that belong to a rank now.

        Every rank's number of rows differs from its share of them by less than one, unless `max_rows`
        says otherwise.

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
        """Sizes within the limits; what is over goes to the first ranks that have room for it.

        Of integers, so that all ranks come to the same. More rows than all have room for are shared as
        if there were no limits.
        """
        most = tf.constant([int(limit) for limit in self.most_rows()], tf.int64)
        own = tf.minimum(sizes, most)
        room = most - own
        over = rows - tf.reduce_sum(own)
        own += tf.clip_by_value(over - tf.cumsum(room, exclusive=True), 0, room)
        bounds = self._bounds_of(rows - tf.reduce_sum(own))
        return own + bounds[1:] - bounds[:-1]

    def most_rows(self) -> list[float]:
        """Of each rank the most rows that the user has set; infinite where there is no limit."""
        limits = None if self.measured is None else self.measured.max_rows
        if limits is None:
            return [float("inf")] * self._num_ranks
        if isinstance(limits, int):
            return [float(limits)] * self._num_ranks
        return [float(limit) for limit in limits]

    def set_parts(self, parts: Sequence[int]) -> None:
        """Changes the shares, between two steps; all ranks do so before the same one.

        Raises:
            ValueError: They are not those of as many ranks.
        """
        parts = tuple(int(part) for part in parts)
        if len(parts) != self._num_ranks or sum(parts) != PARTS or min(parts) < 0:
            raise ValueError(
                f"Shares are {self._num_ranks} integers that add up to {PARTS}. Received: {parts}."
            )
        self._bounds.assign(_sums(parts))
        self.parts = parts

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps; None where shares are fixed."""
        if self.measured is None:
            return None
        speeds = None if self.speeds is None else list(self.speeds)
        return {"parts": list(self.parts), "speeds": speeds}

    def restore(self, state: dict[str, Any] | None) -> bool:
        """Takes over what `state` returned; returns whether it was for as many ranks."""
        if self.measured is None or state is None or len(state["parts"]) != self._num_ranks:
            return False
        self.set_parts(state["parts"])
        self.speeds = None if state["speeds"] is None else tuple(state["speeds"])
        return True


def _sums(parts: Sequence[int]) -> list[int]:
    found = [0]
    for part in parts:
        found.append(found[-1] + part)
    return found


def _check_length(name: str, values: Any, num_ranks: int) -> None:
    if len(values) != num_ranks:
        raise checks.refuse(
            name, values, f"one number for each of the {num_ranks} rank(s) that hold other rows"
        )
