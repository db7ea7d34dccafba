"""Rows of a batch in proportion to the speeds of ranks."""

from __future__ import annotations

from collections.abc import Sequence

#: The smallest share relative to the largest: a rank with less could not be measured any more.
_LEAST_OF_LARGEST = 1 / 64


def balanced_rows(total: float, speeds: Sequence[float], most: Sequence[float]) -> list[float]:
    """Divides rows in proportion to speeds, within the limits of the ranks.

    Rows beyond the limit of a rank are divided among the others in proportion to their speeds. If all ranks
    reach their limits, rows are divided in proportion to the limits.

    Args:
        total: The number of rows.
        speeds: The speed of each rank, in rows per second.
        most: The limit of each rank, in rows.
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
