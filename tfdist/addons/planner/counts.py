"""The sizes of models, for messages."""

from __future__ import annotations


def as_count(count: float) -> str:
    """A number with K, M, B (10^9) or T (10^12), as used for the sizes of models."""
    if abs(count) >= 1e16:
        return f"{count:.4g}"
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.4g}{unit}"
    return f"{count:.4g}"
