"""Since when a process is on the way back to where a training stood."""

from __future__ import annotations

import contextlib
import os
import time

import psutil

__all__ = ["FAILED_AT", "down_since"]

#: A variable by which a launcher tells ranks when the run before failed, by the wall clock.
FAILED_AT = "TFDIST_FAILED_AT"


def down_since() -> float:
    """When the run before failed, where a launcher says so; else when this process began.

    Returns:
        Seconds of the wall clock, in the past.
    """
    now, begun = time.time(), psutil.Process().create_time()
    with contextlib.suppress(KeyError, ValueError):
        begun = float(os.environ[FAILED_AT])
    # Clocks of hosts differ, and one may have been set.
    return begun if begun <= now else now
