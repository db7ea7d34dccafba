"""Records of a launcher for the recovery of a training: when it failed, and its newest checkpoint."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

#: A variable in which a launcher passes when the previous run failed, in seconds since the epoch.
FAILED_AT = "TFDIST_FAILED_AT"
#: A variable in which a launcher passes the file that names the newest checkpoint.
NEWEST = "TFDIST_NEWEST_CHECKPOINT"


def note_newest(path: str) -> None:
    """Reports a complete checkpoint to the launcher, if there is one on this machine."""
    # The file only serves a message at the end, so an error must not stop the training.
    with contextlib.suppress(KeyError, OSError):
        Path(os.environ[NEWEST]).write_text(path)
