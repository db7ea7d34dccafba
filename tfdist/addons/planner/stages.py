"""The partition of a chain of parts into the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: The number of repetitions of each part of the chain in a stage.
Stage = tuple[int, ...]

_SLACK = 1e-9


def cut(counts: Sequence[int], costs: Sequence[float], stages: int) -> list[Stage]:
    """Split a chain into stages so that the maximum cost of a stage is minimal.

    A part can be split between its repetitions. Bisection finds the smallest limit on the cost of a
    stage for which greedy filling requires at most `stages` stages.

    Args:
        counts: Repetitions of each part of the chain.
        costs: Cost of one repetition of each part, in any unit.
        stages: Number of stages.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    if sum(counts) < stages:
        raise ValueError(
            f"The number of stages must be at most the number of layers. Received: {stages} stages, "
            f"{sum(counts)} layers."
        )
    if stages == 1:
        return [tuple(counts)]
    total = sum(count * cost for count, cost in zip(counts, costs, strict=True))
    low, high = max(max(costs), total / stages), total
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if _stages_of(counts, costs, middle) <= stages:
            high = middle
        else:
            low = middle
    return _fill(counts, costs, stages, high)


def _stages_of(counts: Sequence[int], costs: Sequence[float], limit: float) -> int:
    """The number of stages of cost at most `limit` that a chain requires."""
    found, room = 1, limit * (1 + _SLACK)
    for count, cost in zip(counts, costs, strict=True):
        if cost <= 0:
            continue
        fits = min(int(room / cost), count)
        room -= fits * cost
        left = count - fits
        if left:
            a_stage = int(limit * (1 + _SLACK) / cost)
            more = math.ceil(left / a_stage)
            found += more
            room = limit * (1 + _SLACK) - (left - (more - 1) * a_stage) * cost
    return found


def _fill(counts: Sequence[int], costs: Sequence[float], stages: int, limit: float) -> list[Stage]:
    """Fill stages greedily up to a limit, leaving at least one layer for each later stage."""
    found: list[list[int]] = [[0] * len(counts)]
    room = limit * (1 + _SLACK)
    ahead = sum(counts)
    for index, (count, cost) in enumerate(zip(counts, costs, strict=True)):
        left = count
        while left:
            behind = stages - len(found)
            fits = (
                min(left, ahead - behind)
                if cost <= 0
                else min(int(room / cost), left, ahead - behind)
            )
            if not behind:
                fits = left  # The last stage gets the remainder, despite rounding.
            if fits > 0:
                found[-1][index] += fits
                room -= fits * cost
                left -= fits
                ahead -= fits
            else:
                found.append([0] * len(counts))
                room = limit * (1 + _SLACK)
    return [tuple(stage) for stage in found]


def of_rank(stages: Sequence[Stage], rank: int, ranks: int) -> list[Stage]:
    """The stages of a rank, where stage s is on rank s mod `ranks`."""
    return list(stages[rank::ranks])
