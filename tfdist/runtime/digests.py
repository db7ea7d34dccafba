"""Digests of compiled files, beside them: what was damaged or swapped is told before it is loaded."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_digest(path: Path) -> None:
    """Writes the digest of a file into another one beside it, in the form of `sha256sum`."""
    made = path.with_name(f"{path.name}.sha256.{os.getpid()}")
    made.write_text(f"{_digest(path)}  {path.name}\n")
    os.replace(made, _beside(path))


def matches_digest(path: Path) -> bool:
    """Whether a file is as it was when its digest was written; not so where there is no digest."""
    try:
        return _beside(path).read_text(errors="replace").split() == [_digest(path), path.name]
    except OSError:
        return False


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
