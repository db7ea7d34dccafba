"""Which device of its machine a rank computes on."""

from __future__ import annotations

import json
import os

import tensorflow as tf

__all__ = ["local_rank", "pin_gpu"]

_LOCAL_RANKS = (
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)


def local_rank() -> int:
    """This process's place among the ranks of its machine, from what started it."""
    for name in _LOCAL_RANKS:
        if name in os.environ:
            return int(os.environ[name])
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    cluster, task = config.get("cluster", {}), config.get("task", {})
    if task.get("type") not in cluster:
        return 0
    hosts = [
        (job, index, address.rsplit(":", 1)[0])
        for job in ("chief", "worker")
        for index, address in enumerate(cluster.get(job, []))
    ]
    own = next(h for h in hosts if h[:2] == (task["type"], int(task["index"])))
    return [h for h in hosts if h[2] == own[2]].index(own)


def pin_gpu() -> None:
    """Leaves this rank the one GPU of its machine that is its own; nothing where there is none.

    Raises:
        ValueError: The machine has GPUs, but fewer than ranks.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    place = local_rank()
    if place >= len(gpus):
        raise ValueError(
            "Each rank computes on a GPU of its own. Received: local rank "
            f"{place} on a machine with {len(gpus)} GPU(s). Start fewer ranks there, or hide the "
            "GPUs with CUDA_VISIBLE_DEVICES= to compute on the CPU."
        )
    tf.config.set_visible_devices(gpus[place], "GPU")
