"""How many rows of a global batch each rank gets, where ranks are not equally fast.

Shares are integer parts of `PARTS`, so that all ranks compute the same bounds whatever their
processors round.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import checks

__all__ = [
    "PARTS",
    "MeasuredShares",
    "RowShares",
    "are_shares",
    "balanced_rows",
    "check_batch_shares",
    "parts_of",
]

#: What the shares of all ranks add up to.
PARTS = 1 << 20
#: No rank's share is smaller, beside the largest: it would not be measured any more.
_LEAST_OF_LARGEST = 1 / 64
#: More than any rank has.
_MOST_RATIO = 1e4


@dataclasses.dataclass(frozen=True)
class MeasuredShares:
    """Rows in proportion to the measured speed of the ranks, for `batch_shares` of a strategy.

    ```python
    strategy = tfdist.strategies.auto(batch_shares=MeasuredShares(max_rows=[64, 16]))
    ```

    `fit` measures how long each rank works in a step, without what it waits for others, and every so
    many steps all ranks agree on new shares. docs/unequal_ranks.md has the formulas.

    Args:
        smoothing: The weight of the newest measurement in a rank's speed, from above 0 to 1; 1 forgets
            what was measured before.
        hysteresis: Shares change only where that shortens a step by more than this part of it.
        max_rows: The most rows that a rank gets of a batch, for its memory: one number for all ranks,
            or one for each rank that holds other rows. None: what the free memory of its host has
            room for, where ranks compute on CPUs; no limit on GPUs.

    Raises:
        ValueError: An argument is out of its range.

    Source: `b_i = B speed_i / (sum of speeds)`, as in Chen et al. 2020, "Semi-dynamic load balancing".
    """

    smoothing: float = 0.5
    hysteresis: float = 0.05
    max_rows: int | Sequence[int] | None = None

    def __post_init__(self):
        checks.number("smoothing", self.smoothing, above=0, maximum=1)
        checks.number("hysteresis", self.hysteresis, minimum=0, maximum=100)
        if self.max_rows is None or isinstance(self.max_rows, int):
            checks.integer("max_rows", self.max_rows, minimum=1, optional=True)
        else:
            found = checks.integers("max_rows", self.max_rows, minimum=1)
            object.__setattr__(self, "max_rows", found)


def check_batch_shares(value: Any) -> None:
    """Checks `batch_shares` of a strategy, as far as that goes without knowing the ranks.

    Raises:
        ValueError: It is neither None, "measured", a `MeasuredShares` nor a list of positive numbers.
    """
    is_word = isinstance(value, str) and value == "measured"
    if value is None or isinstance(value, MeasuredShares) or is_word:
        return
    meaning = (
        '"measured", a MeasuredShares, None, or a list of a positive number for each rank that holds '
        f"other rows, the largest at most {_MOST_RATIO:,.0f} times the smallest"
    )
    try:
        found = checks.numbers_of("batch_shares", value, minimum=0)
    except ValueError:
        raise checks.refuse("batch_shares", value, meaning) from None
    if not min(found) > 0 or max(found) / min(found) > _MOST_RATIO:
        raise checks.refuse("batch_shares", value, meaning)


def parts_of(shares: Sequence[float]) -> tuple[int, ...]:
    """Integers that add up to `PARTS`, in proportion to positive numbers."""
    total, bounds, sum_so_far = sum(shares), [0], 0.0
    for share in shares:
        sum_so_far += share
        bounds.append(round(PARTS * (sum_so_far / total)))
    return tuple(high - low for low, high in itertools.pairwise(bounds))


def balanced_rows(total: float, speeds: Sequence[float], most: Sequence[float]) -> list[float]:
    """Divides rows in proportion to speeds, where no rank gets more than its most.

    What a rank at its limit cannot take the others share in proportion to their speeds. Where all
    are at their limits, rows are divided in proportion to these.

    Args:
        total: How many rows there are.
        speeds: Of each rank, in rows per second.
        most: Of each rank, the most rows.
    """
    if sum(most) <= total:
        return [total * each / sum(most) for each in most]
    least = max(speeds) * _LEAST_OF_LARGEST
    speeds = [max(speed, least) for speed in speeds]
    rows: dict[int, float] = {}
    free = set(range(len(speeds)))
    while free:
        left = total - sum(rows.values())
        sum_of_speeds = sum(speeds[rank] for rank in free)
        each = {rank: left * speeds[rank] / sum_of_speeds for rank in free}
        full = {rank for rank in free if each[rank] > most[rank]}
        if not full:
            rows |= each
            break
        rows |= {rank: most[rank] for rank in full}
        free -= full
    return [rows[rank] for rank in range(len(speeds))]


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


def are_shares(state: Any) -> bool:
    """Whether a value of a file is what `RowShares.state` returns; raises, or is False, where not."""
    if state is None:
        return True
    parts, speeds = state["parts"], state["speeds"]
    return (
        all(type(part) is int and 0 <= part <= PARTS for part in parts)
        and sum(parts) == PARTS
        and (
            speeds is None
            or (
                len(speeds) == len(parts)
                and all(type(s) is float and 0 < s < float("inf") for s in speeds)
            )
        )
    )


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
