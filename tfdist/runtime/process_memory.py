"""The memory of this process, as reported by Linux.

Not by `getrusage`: its peak includes that of the process that started this one.
"""

from __future__ import annotations


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
