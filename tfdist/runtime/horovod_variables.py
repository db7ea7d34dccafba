"""The environment variables that Horovod's launchers set."""

from __future__ import annotations

import os
from collections.abc import Mapping


def started_by_horovod(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Returns (rank, size) if tfdist-run or horovodrun started this process, else None.

    Raises:
        ValueError: A variable is missing, or is not a number.
    """
    found = {name: environment.get(name) for name in ("HOROVOD_RANK", "HOROVOD_SIZE")}
    if not any(name in environment for name in found):
        return None
    for name, text in found.items():
        if text is None or not text.isascii() or not text.isdigit():
            raise ValueError(
                "HOROVOD_RANK and HOROVOD_SIZE must be numbers, as set by a launcher of Horovod. "
                f"Received: {name}={text!r}. Unset both to run without a launcher."
            )
    rank, size = (int(text) for text in found.values() if text)
    return rank, size
