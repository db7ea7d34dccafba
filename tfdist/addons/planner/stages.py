"""A chain of parts, cut into the stages of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: How many repetitions of each part of the chain a stage has.
Stage = tuple[int, ...]

_SLACK = 1e-9


def cut(counts: Sequence[int], costs: Sequence[float], stages: int) -> list[Stage]:
    """Cuts a chain so that the costliest stage costs as little as possible.

    A part of several repetitions is cut between these. A limit can be kept if filling stages one after
    the other up to it takes no more of them than there are; the least such limit is found by bisection.

    Args:
        counts: Repetitions of each part of the chain.
        costs: Of one repetition of each part, in any unit.
        stages: How many stages.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    if sum(counts) < stages:
        raise ValueError(
            f"A pipeline has at most as many stages as layers. Received: {stages} stages, "
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
    """How many stages of at most `limit` a chain takes."""
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
    """Stages filled one after the other up to a limit; each behind gets a layer at least."""
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
                fits = left  # Rounding must not leave one over.
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
    """The stages of a rank, when stage s lies on rank s mod `ranks`."""
    return list(stages[rank::ranks])
