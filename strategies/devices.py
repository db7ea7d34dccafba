"""The device of a rank."""

from __future__ import annotations

import os

import tensorflow as tf

from tfdist.runtime.tf_config import read_tf_config

_LOCAL_RANKS = (
    "HOROVOD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "SLURM_LOCALID",
)


def local_rank() -> int:
    """This process's place among the ranks of its machine, as set by its launcher.

    Raises:
        ValueError: TF_CONFIG is malformed.
    """
    for name in _LOCAL_RANKS:
        if name in os.environ:
            return int(os.environ[name])
    config = read_tf_config()
    if config is None or config.job == "ps":
        return 0
    hosts = [address.rpartition(":")[0] for address in config.workers]
    return hosts[: config.index].count(hosts[config.index])


def pin_gpu() -> None:
    """Makes only one GPU of the machine visible to this rank; does nothing without GPUs.

    Raises:
        ValueError: The machine has GPUs, but fewer than ranks.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    place = local_rank()
    if place >= len(gpus):
        raise ValueError(
            "Each rank requires its own GPU. Received: local rank "
            f"{place} on a machine with {len(gpus)} GPU(s). Start fewer ranks there, or hide the "
            "GPUs with CUDA_VISIBLE_DEVICES= to compute on the CPU."
        )
    tf.config.set_visible_devices(gpus[place], "GPU")
