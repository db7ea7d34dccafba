"""The number of ranks for a machine: one for each GPU, else its cores divided by threads per rank."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

#: A variable with the number of ranks for which an elastic job was configured.
MEANT_RANKS = "TFDIST_MEANT_RANKS"
_DEVICES = "/dev/nvidia[0-9]*"
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


def ranks_of_this_machine(
    words: Sequence[str], environment: Mapping[str, str] = os.environ
) -> tuple[int, str]:
    """The number of ranks of `-np auto`, and the reason as text.

    Args:
        words: The command of a rank, in which `--threads` is looked up.
        environment: Environment variables of the ranks.
    """
    gpus = count_gpus(environment)
    if gpus:
        return gpus, "one for each GPU"
    cores, threads = count_cores(), _threads(words, environment)
    each = f" divided by {threads} threads per rank" if threads > 1 else ""
    return max(1, cores // threads), f"{cores} core{'s' * (cores > 1)}{each}"


def count_gpus(environment: Mapping[str, str] = os.environ) -> int:
    """The number of NVIDIA GPUs visible to processes, from the driver's device files."""
    there = len([path for path in glob.glob(_DEVICES) if re.fullmatch(r"/dev/nvidia\d+", path)])
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not there:
        return there
    chosen = 0
    for name in filter(None, (part.strip() for part in visible.split(","))):
        if name.lstrip("-").isdigit() and not 0 <= int(name) < there:
            break  # CUDA ignores all devices after an invalid one.
        chosen += 1
    return min(chosen, there)


def count_cores(quota: Path = _QUOTA) -> int:
    """The number of cores that this process may use, within the quota of a container."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        most, period = quota.read_text().split()
        return min(cores, max(1, int(most) // int(period)))
    except (OSError, ValueError):
        return cores  # Without a quota there is no file, or it contains "max".


def _threads(words: Sequence[str], environment: Mapping[str, str]) -> int:
    given = [match for word in words if (match := re.fullmatch(r"--?threads=(\d{1,4})", word))]
    texts = [match[1] for match in given[-1:]] + [environment.get(name, "") for name in _THREADS]
    for text in texts:
        if re.fullmatch(r"[1-9]\d{0,3}", text):
            return int(text)
    return 1
