"""A switch for tests: several ranks on one GPU."""

from __future__ import annotations

import os

#: The variable: 1 allows several ranks on one GPU.
SHARE_GPUS = "TFDIST_SHARE_GPUS"


def shares_gpus() -> bool:
    """Whether several ranks may have one GPU."""
    return os.environ.get(SHARE_GPUS) == "1"
