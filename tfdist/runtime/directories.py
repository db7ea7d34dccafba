"""Checks the paths of checkpoint directories, before any import that takes long."""

from __future__ import annotations

import os
import re
from typing import Any

from tfdist.utils.checks import refuse

#: The object stores that TensorStore can write to.
SCHEMES = ("gs", "s3")


def is_address(path: str) -> bool:
    """Whether a path is the address of an object store."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def checked_directory(directory: Any, name: str = "directory") -> str:
    """A folder, or an address of an object store, in normalized form.

    Messages call it `name`.

    Raises:
        TypeError: It is not a path.
        ValueError: Checkpoints cannot be stored at this path.
    """
    path = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
    if not isinstance(path, str):
        raise refuse(name, directory, "a path: a string or a `Path`", TypeError)
    if path.lower().startswith("file://"):
        path = path[len("file://") :]
    if is_address(path):
        scheme, _, rest = path.partition("://")
        bucket = rest.partition("/")[0]
        if scheme not in SCHEMES or not bucket or "\0" in path:
            addresses = " or ".join(f"{each}://bucket/folder" for each in SCHEMES)
            raise refuse(name, directory, f"a folder, or the address of a bucket: {addresses}")
        return path.rstrip("/")
    if not path.strip() or "\0" in path:
        raise refuse(name, directory, "the path of a folder")
    if os.path.abspath(path) in ("/", "//"):
        raise refuse(name, directory, "a separate folder, not the root of the file system")
    return path.rstrip("/")
