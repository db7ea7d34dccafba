"""Seconds and counts with units, for messages."""

from __future__ import annotations

import math

#: With the least number of each unit that is shown in it.
_TIMES = (("days", 86_400, 2), ("h", 3600, 2), ("min", 60, 2), ("s", 1, 1), ("ms", 1e-3, 1))


def as_seconds(seconds: float) -> str:
    """A time in the unit that keeps it short."""
    if not math.isfinite(seconds):
        return "never"
    for unit, factor, least in _TIMES:
        if seconds >= least * factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def as_count(count: float) -> str:
    """A number with K, M, B (10^9) or T (10^12), as used for the sizes of models."""
    if abs(count) >= 1e16:
        return f"{count:.4g}"
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.4g}{unit}"
    return f"{count:.4g}"
