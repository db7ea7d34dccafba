"""Digests of built files, stored next to them."""

from __future__ import annotations

import os
from pathlib import Path

from tfdist.runtime.digests import digest_of


def write_digest(path: Path) -> None:
    """Writes the digest of a file into a file next to it, in the format of `sha256sum`."""
    made = path.with_name(f"{path.name}.sha256.{os.getpid()}")
    made.write_text(f"{digest_of(path)}  {path.name}\n")
    os.replace(made, path.with_name(f"{path.name}.sha256"))
