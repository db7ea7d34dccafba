"""Programs as users start them."""

from __future__ import annotations

import os
import subprocess
import sys

__all__ = ["BIN", "run"]

BIN = os.path.dirname(sys.executable)


def run(command, timeout=150):
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment, check=False
    )
