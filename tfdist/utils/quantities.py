"""Bytes with units, parsed and formatted."""

from __future__ import annotations

import re

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([KMGTP]i?)?B", re.ASCII)


def read_bytes(text: str) -> int:
    """The number of bytes in a string such as "80GiB", "24 GB" or "512MiB".

    Raises:
        ValueError: The string is not a number with a unit of bytes, or is less than one byte.
    """
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    size = round(float(found[1]) * (_DECIMAL | _BINARY)[found[2] or ""]) if found else 0
    if size < 1:
        raise ValueError(
            f"A size must be a number with a unit, such as 80GiB or 24GB. Received: {text!r}."
        )
    return size


def as_bytes(size: float, digits: int = 4) -> str:
    """A size in the largest binary unit in which it is at least one."""
    for unit, factor in reversed(_BINARY.items()):
        if abs(size) >= factor:
            return f"{size / factor:.{digits}g} {unit}B"
    return f"{size:.0f} B"
