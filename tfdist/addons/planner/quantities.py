"""Seconds and counts with units, for messages, and sizes from texts."""

from __future__ import annotations

import math
import re

from tfdist.utils.quantities import BINARY

#: With the least number of each unit that is shown in it.
_TIMES = (("days", 86_400, 2), ("h", 3600, 2), ("min", 60, 2), ("s", 1, 1), ("ms", 1e-3, 1))


_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([KMGTP]i?)?B", re.ASCII)


def read_bytes(text: str) -> int:
    """The number of bytes in a string such as "80GiB", "24 GB" or "512MiB".

    Raises:
        ValueError: The string is not a number with a unit of bytes, or is less than one byte.
    """
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    size = round(float(found[1]) * (_DECIMAL | BINARY)[found[2] or ""]) if found else 0
    if size < 1:
        raise ValueError(
            f"A size must be a number with a unit, such as 80GiB or 24GB. Received: {text!r}."
        )
    return size


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
