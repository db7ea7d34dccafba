"""Python in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def python(code: str, *arguments: str) -> str:
    """What a program prints, which must end regularly."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
