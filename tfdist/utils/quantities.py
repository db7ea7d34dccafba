"""Bytes with units."""

from __future__ import annotations

#: The binary units of bytes.
BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def as_bytes(size: float, digits: int = 4) -> str:
    """A size in the largest binary unit in which it is at least one."""
    for unit, factor in reversed(BINARY.items()):
        if abs(size) >= factor:
            return f"{size / factor:.{digits}g} {unit}B"
    return f"{size:.0f} B"
