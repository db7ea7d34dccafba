"""Where checkpoints may lie: which paths are right, before anything is imported that takes its time."""

from __future__ import annotations

import os
import re
from typing import Any

from tfdist.utils.checks import shown

#: What TensorStore can write to over a network.
SCHEMES = ("gs", "s3")


def is_address(path: str) -> bool:
    """Whether a path is the address of an object store."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def checked_directory(directory: Any, name: str = "directory") -> str:
    """A folder, or an address of an object store, as the other functions take it.

    Messages call it `name`.

    Raises:
        TypeError: It is no path.
        ValueError: It is the path of nothing that checkpoints can lie in.
    """
    try:
        path = os.fspath(directory)
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise TypeError(f"`{name}` is a path: a string or a `Path`. Received: {shown(directory)}.")
    if path.lower().startswith("file://"):
        path = path[len("file://") :]
    if is_address(path):
        scheme, _, rest = path.partition("://")
        bucket = rest.partition("/")[0]
        if scheme not in SCHEMES or not bucket or "\0" in path:
            raise ValueError(
                f"`{name}` is a folder, or the address of a bucket: "
                f"{' or '.join(f'{each}://bucket/folder' for each in SCHEMES)}. "
                f"Received: {shown(directory)}."
            )
        return path.rstrip("/")
    if not path.strip() or "\0" in path:
        raise ValueError(f"`{name}` is the path of a folder. Received: {shown(directory)}.")
    if os.path.abspath(path) in ("/", "//"):
        raise ValueError(
            f"`{name}` is a folder of its own, not the root of the file system. Received: "
            f"{shown(directory)}."
        )
    return path.rstrip("/")
