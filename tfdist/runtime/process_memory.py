"""The memory of this process as Linux counts it, and what its machine or container has left.

Not by `getrusage`: its peak goes on counting that of the process that started this one.
"""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Bytes of this process in memory."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The most bytes that it had in memory, since `forget_peak` if that was called."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Makes the peak what is in memory now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def available_bytes(root: Path = _CGROUPS) -> tuple[int, str]:
    """The memory that new processes can have, and whose limit that is, in words.

    Args:
        root: Where cgroups are.
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
    """The cgroup of this process and those around it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    own = [line.split(":", 2)[2].strip("/") for line in lines if line.startswith("0::")]
    folder = root / own[0] if own and own[0] else root
    return [root, *(each for each in (folder, *folder.parents) if root in each.parents)]


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no such file or it says "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
