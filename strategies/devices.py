"""The GPU of a rank, and the comparison of all ranks' devices."""

from __future__ import annotations

import ctypes
import os

import tensorflow as tf
from absl import logging

from tfdist.backend import devices
from tfdist.collectives.engine import Engine
from tfdist.collectives.objects import all_gather_object
from tfdist.runtime.rendezvous import LOCAL_RANK
from tfdist.runtime.shared_gpus import SHARE_GPUS, shares_gpus
from tfdist.runtime.tf_config import read_tf_config

#: The variable of Horovod's launchers, which is not inherited from an allocation or an outer launcher.
_HOROVOD_LOCAL_RANK = "HOROVOD_LOCAL_RANK"
#: The variables of launchers in which TF_CONFIG may be set for other ranks than theirs.
_SCHEDULERS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def local_rank() -> int:
    """This process's place among the ranks of its machine, as set by its launcher.

    Raises:
        ValueError: TF_CONFIG is malformed.
    """
    for name in (LOCAL_RANK, _HOROVOD_LOCAL_RANK):
        if name in os.environ:
            return int(os.environ[name])
    config = read_tf_config()
    if config is not None and config.job != "ps":
        hosts = [address.rpartition(":")[0] for address in config.workers]
        return hosts[: config.index].count(hosts[config.index])
    for name in _SCHEDULERS if config is None else ():
        if name in os.environ:
            return int(os.environ[name])
    return 0


def pin_gpu() -> None:
    """Makes only one GPU of the machine visible to this rank; does nothing without GPUs.

    A single visible GPU is taken as the launcher's choice for this rank. TensorFlow allocates its memory as it
    is needed, unless the program has set another way: NCCL also allocates memory.

    Raises:
        ValueError: The machine has several GPUs, but fewer than ranks.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    place = local_rank() if len(gpus) > 1 else 0
    if shares_gpus():
        place %= len(gpus)
        os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        logging.warning("tfdist: %s=1: several ranks may compute on one GPU.", SHARE_GPUS)
    if place >= len(gpus):
        raise ValueError(
            "Each rank requires its own GPU. Received: local rank "
            f"{place} on a machine with {len(gpus)} GPU(s). Start fewer ranks there, or hide the "
            "GPUs with CUDA_VISIBLE_DEVICES= to compute on the CPU."
        )
    gpu = gpus[place]
    tf.config.set_visible_devices(gpu, "GPU")
    is_limited = tf.config.get_logical_device_configuration(gpu) is not None
    if not is_limited and "TF_FORCE_GPU_ALLOW_GROWTH" not in os.environ:
        tf.config.experimental.set_memory_growth(gpu, True)


def check_devices(engine: Engine) -> None:
    """Compares the devices of all ranks, which call this together after the rendezvous.

    Raises:
        ValueError: Some ranks have a GPU and others do not, two ranks have the same GPU, or a rank has a part of
            a GPU (MIG).
    """
    if engine.size == 1:
        return
    own = _gpu_id() if devices.has_gpu() else None
    everyone = all_gather_object((devices.has_gpu(), own), engine.group(), name="devices")
    lacking = [rank for rank, (has_gpu, _) in enumerate(everyone) if not has_gpu]
    if 0 < len(lacking) < engine.size:
        raise ValueError(
            "All ranks must have a GPU, or none. Received: no GPU on the ranks "
            f"{lacking} of {engine.size}. Hide the GPUs of the others with CUDA_VISIBLE_DEVICES=, or "
            "start ranks only where there are GPUs."
        )
    ids = [gpu for _, gpu in everyone]
    parts = [rank for rank, gpu in enumerate(ids) if gpu is not None and gpu.startswith("MIG")]
    if parts:
        raise ValueError(
            "Several ranks are not supported on parts of GPUs (MIG), where collectives have not been tried. "
            f"Received: parts of GPUs on the ranks {parts}. Disable MIG, or start one rank."
        )
    for rank, gpu in enumerate(ids):
        if gpu is not None and gpu in ids[:rank] and not shares_gpus():
            raise ValueError(
                "Each rank requires its own GPU. Received: the ranks "
                f"{ids.index(gpu)} and {rank} with the GPU {gpu}. Correct CUDA_VISIBLE_DEVICES, which "
                "the launcher of the ranks sets."
            )


def _gpu_id() -> str | None:
    """The unique id of this rank's GPU, from the driver; None if the driver cannot be asked."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    (gpu, *_) = tf.config.get_visible_devices("GPU")
    number = int(gpu.name.rpartition(":")[2])
    if number < len(visible) and visible[number].startswith("MIG"):
        return visible[number]
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    calls = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(device), number),
        lambda: driver.cuDeviceGetUuid(ctypes.byref(uuid), device),
    )
    return None if any(call() for call in calls) else f"GPU-{bytes(uuid).hex()}"
