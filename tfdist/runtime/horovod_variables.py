"""The environment variables that Horovod's launchers set, and the NCCL that it was built with."""

from __future__ import annotations

import importlib.util
import mmap
import os
from collections.abc import Mapping
from pathlib import Path


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


def find_nccl() -> Path | None:
    """The folder of the NCCL that `tensorflow[and-cuda]` installs, or None."""
    found = importlib.util.find_spec("nvidia")
    places = list(found.submodule_search_locations or []) if found is not None else []
    folders = [Path(place, "nccl") for place in places]
    return next((each for each in folders if (each / "lib" / "libnccl.so.2").exists()), None)


def has_nccl() -> bool:
    """Whether the installed Horovod was built with NCCL; False without Horovod.

    Read from the library, since `horovod.tensorflow` takes seconds to be imported.
    """
    found = importlib.util.find_spec("horovod")
    if found is None or not found.submodule_search_locations:
        return False
    folder = Path(found.submodule_search_locations[0], "tensorflow")
    for path in folder.glob("mpi_lib*.so"):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if text.find(b"ncclAllReduce") >= 0:
                return True
    return False
