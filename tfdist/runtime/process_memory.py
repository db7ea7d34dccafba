"""The memory of this process, as reported by Linux, and the available memory of its host or container.

Not by `getrusage`: its peak includes that of the process that started this one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """The resident memory of this process, in bytes."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """The peak of the resident memory in bytes, since `forget_peak` if that was called."""
    return _status("VmHWM")


def forget_peak() -> None:
    """Resets the peak to the current resident memory."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


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
