"""Shares of a batch for ranks that are not equally fast: how they are given, and checks.

Without TensorFlow: a launcher checks shares before importing it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from tfdist.utils import checks

#: The sum of the shares of all ranks.
PARTS = 1 << 20
#: The largest accepted ratio of two shares.
MOST_RATIO = 1e4


@dataclasses.dataclass(frozen=True)
class MeasuredShares:
    """Rows in proportion to the measured speed of the ranks, for `batch_shares` of a strategy.

    ```python
    strategy = tfdist.strategies.auto(batch_shares=MeasuredShares(max_rows=[64, 16]))
    ```

    `fit` measures the working time of each rank in a step, without the time it waits for others, and all
    ranks periodically agree on new shares. See tfdist/addons/unequal_ranks/README.md for the formulas.

    Args:
        smoothing: The weight of the latest measurement in a rank's speed, above 0 and at most 1; 1 ignores
            earlier measurements.
        hysteresis: The fraction of the step time that new shares must save; otherwise they do not change.
        max_rows: The largest number of rows of a batch for a rank, to limit its memory: one number for all
            ranks, or one for each rank with different rows. None: limited by the free memory of the host
            for ranks on CPUs; no limit on GPUs.

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
    """Checks `batch_shares` of a strategy, without its number of ranks.

    Raises:
        ValueError: It is not None, "measured", a `MeasuredShares` or a list of positive numbers.
    """
    is_word = isinstance(value, str) and value == "measured"
    if value is None or isinstance(value, MeasuredShares) or is_word:
        return
    meaning = (
        '"measured", a MeasuredShares, None, or a list with a positive number for each rank with '
        f"different rows, the largest at most {MOST_RATIO:,.0f} times the smallest"
    )
    try:
        found = checks.numbers_of("batch_shares", value, minimum=0)
    except ValueError:
        raise checks.refuse("batch_shares", value, meaning) from None
    if not min(found) > 0 or max(found) / min(found) > MOST_RATIO:
        raise checks.refuse("batch_shares", value, meaning)


def parts_of(shares: Sequence[float]) -> tuple[int, ...]:
    """Integers that add up to `PARTS`, in proportion to positive numbers."""
    total, sums = sum(shares), itertools.accumulate(shares, initial=0.0)
    bounds = [round(PARTS * (sum_so_far / total)) for sum_so_far in sums]
    return tuple(high - low for low, high in itertools.pairwise(bounds))
