"""Since when a process is on the way back to where a training stood, and where it would come back to."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

#: A variable by which a launcher tells ranks when the run before failed, by the wall clock.
FAILED_AT = "TFDIST_FAILED_AT"
#: A variable by which a launcher names the file in which it looks for the newest checkpoint.
NEWEST = "TFDIST_NEWEST_CHECKPOINT"


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


def note_newest(path: str) -> None:
    """Tells the launcher, where there is one on this machine, of a whole checkpoint."""
    # What a message would say at the end is not worth an error of the training.
    with contextlib.suppress(KeyError, OSError):
        Path(os.environ[NEWEST]).write_text(path)
