"""The memory of this process as Linux counts it.

Not by `getrusage`: its peak goes on counting that of the process that started this one.
"""

from __future__ import annotations

__all__ = ["forget_peak", "peak_bytes", "resident_bytes"]


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
