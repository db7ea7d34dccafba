"""What Horovod's launchers tell a process by its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping


def started_by_horovod(
    environment: Mapping[str, str] = os.environ,
) -> tuple[int, int] | None:
    """Returns (rank, size) where tfdist-run or horovodrun started this process, else None.

    Raises:
        ValueError: A variable is missing, or is no number.
    """
    names = ("HOROVOD_RANK", "HOROVOD_SIZE")
    if not any(name in environment for name in names):
        return None
    found = []
    for name in names:
        text = environment.get(name, "")
        if not text.isascii() or not text.isdigit():
            raise ValueError(
                f"A launcher of Horovod sets HOROVOD_RANK and HOROVOD_SIZE to numbers. Received: "
                f"{name}={environment.get(name)!r}. Unset both to run without a launcher."
            )
        found.append(int(text))
    return found[0], found[1]
