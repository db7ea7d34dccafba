"""Digests of compiled files, stored next to them, to detect corruption before a file is loaded."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_digest(path: Path) -> None:
    """Writes the digest of a file into a file next to it, in the format of `sha256sum`."""
    made = path.with_name(f"{path.name}.sha256.{os.getpid()}")
    made.write_text(f"{_digest(path)}  {path.name}\n")
    os.replace(made, path.with_name(f"{path.name}.sha256"))


def matches_digest(path: Path) -> bool:
    """Whether a file matches the digest next to it; False if there is no digest."""
    try:
        stored = path.with_name(f"{path.name}.sha256").read_text(errors="replace").split()
        return stored == [_digest(path), path.name]
    except OSError:
        return False


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
