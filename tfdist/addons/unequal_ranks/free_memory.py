"""The available memory of this host or container. No TensorFlow."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(root: Path = _CGROUPS) -> tuple[int, str]:
    """The memory that new processes can allocate, in bytes, and the scope of that limit in words.

    Args:
        root: The folder of the cgroups.
    """
    free, whose = psutil.virtual_memory().available, ""
    for limit_file, used_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        for folder in _own_cgroups(root):
            limit, used = _number(folder / limit_file), _number(folder / used_file)
            if limit is not None and used is not None and limit - used < free:
                free, whose = max(0, limit - used), " in this container"
    return free, whose


def _own_cgroups(root: Path) -> list[Path]:
    """The cgroup of this process and its ancestors."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    folder = root / own
    return [root, *(each for each in (folder, *folder.parents) if root in each.parents)]


def _number(file: Path) -> int | None:
    """The number in a file; None if there is no such file or it contains "max"."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None
