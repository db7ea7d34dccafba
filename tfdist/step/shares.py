"""Shares of a batch for ranks that are not equally fast: what is legal, and what follows from speeds.

No TensorFlow: a launcher checks them before it is imported.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from tfdist.utils import checks

#: What the shares of all ranks add up to.
PARTS = 1 << 20
#: No rank's share is smaller, beside the largest: it would not be measured any more.
_LEAST_OF_LARGEST = 1 / 64
#: More than any rank has.
MOST_RATIO = 1e4


@dataclasses.dataclass(frozen=True)
class MeasuredShares:
    """Rows in proportion to the measured speed of the ranks, for `batch_shares` of a strategy.

    ```python
    strategy = tfdist.strategies.auto(batch_shares=MeasuredShares(max_rows=[64, 16]))
    ```

    `fit` measures how long each rank works in a step, without what it waits for others, and every so
    many steps all ranks agree on new shares. tfdist/addons/unequal_ranks/README.md has the formulas.

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
        f"other rows, the largest at most {MOST_RATIO:,.0f} times the smallest"
    )
    try:
        found = checks.numbers_of("batch_shares", value, minimum=0)
    except ValueError:
        raise checks.refuse("batch_shares", value, meaning) from None
    if not min(found) > 0 or max(found) / min(found) > MOST_RATIO:
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
