"""Digests of compiled files, stored next to them, to detect corruption before a file is loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path


def matches_digest(path: Path) -> bool:
    """Whether a file matches the digest next to it; False if there is no digest."""
    try:
        stored = path.with_name(f"{path.name}.sha256").read_text(errors="replace").split()
        return stored == [digest_of(path), path.name]
    except OSError:
        return False


def digest_of(path: Path) -> str:
    """The digest of a file: SHA-256, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
