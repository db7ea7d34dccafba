"""Checks of this machine: cores, memory, folders, GPUs."""

from __future__ import annotations

import glob
import os
import platform
import re
import resource
import shutil
import tempfile

from tfdist.addons.unequal_ranks.free_memory import available_bytes
from tfdist.launch.doctor.findings import Finding, answer_of, note, ok, problem
from tfdist.launch.doctor.software import Trials
from tfdist.launch.install_horovod.cuda_packages import NCCL, OLDEST_DRIVER
from tfdist.launch.install_horovod.prerequisites import installed_version
from tfdist.launch.run.num_ranks import count_cores
from tfdist.runtime.horovod_variables import has_nccl
from tfdist.runtime.shared_gpus import shares_gpus
from tfdist.runtime.versions import why_no_tpu
from tfdist.utils.checks import one_line

_GIB = 1 << 30
_ONEDNN = "TF_ENABLE_ONEDNN_OPTS"
#: Memory of a rank without a model: Python, TensorFlow, Keras and an engine, rounded up.
RANK_BYTES = 3 * _GIB // 4
#: Address space of a rank, most of which is not backed by memory.
_RANK_ADDRESSES = 4 * _GIB
_LEAST_FREE = _GIB
_LEAST_FILES = 1024
_ATTENTION = (
    "tfdist.layers: products of all scores up to 2 GiB, else blocks; KerasHub: products; "
    "not cuDNN's fused kernel"
)
#: What shows that a machine has a TPU.
_TPU_VARIABLES = ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")
_TPU_DEVICES = "/dev/accel[0-9]*"
#: Minimum size of /dev/shm, which NCCL uses between the ranks of a host.
_LEAST_SHARED = 256 << 20


def processor(num_ranks: int) -> list[Finding]:
    """Check the cores and the limit of open files."""
    cores = count_cores()
    found = [ok("Cores", f"{cores}")]
    if num_ranks > cores:
        text = f"{cores} for {num_ranks} ranks, which share them, so that training is slow"
        found = [note("Cores", text, f"-np {cores}, unless ranks compute on GPUs")]
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _LEAST_FILES:
        text = f"a process may open {files}, which many ranks and checkpoints exceed"
        found.append(problem("Open files", text, f"ulimit -n {_LEAST_FILES * 4}"))
    return found


def kernels(trials: Trials | None) -> list[Finding]:
    """Check whether TensorFlow disables oneDNN, as on x86 without AVX-512 VNNI and AMX."""
    if trials is None or trials.has_onednn is not False or trials.gpus():
        return []
    if _ONEDNN in os.environ or platform.machine() != "x86_64":
        return []
    text = "TensorFlow disables oneDNN on this processor; products are often faster with it"
    return [note("Kernels", text, f"export {_ONEDNN}=1, and compare the time of a step")]


def memory(num_ranks: int) -> list[Finding]:
    """Check whether the ranks fit into memory, without a model."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _RANK_ADDRESSES:
        text = (
            f"a process may address {_gib(limit)}, but TensorFlow requires {_gib(_RANK_ADDRESSES)}"
        )
        return [problem("Memory", text, "ulimit -v unlimited")]
    free, whose = available_bytes()
    needed = num_ranks * RANK_BYTES
    if free >= needed:
        return [ok("Memory", f"{_gib(free)} free{whose}")]
    fitting = free // RANK_BYTES
    text = f"{_gib(free)} free{whose}, but {num_ranks} rank(s) require {_gib(needed)} even without a model"
    remedy = "End other programs, or use a machine or a container with more memory"
    return [problem("Memory", text, f"-np {fitting}" if fitting else remedy)]


def folders(work: str) -> list[Finding]:
    """Check whether the working and temporary folders are writable and have free space."""
    return [
        *_folder("Work folder", work, "Use another one, or make it writable"),
        *_folder("TMPDIR", _temporary(), "export TMPDIR= a writable folder"),
    ]


def _temporary() -> str:
    return os.environ.get("TMPDIR") or "/tmp"


def _folder(what: str, path: str, remedy: str) -> list[Finding]:
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".tfdist-doctor-") as file:
            file.write(b"0" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(path).free
    except OSError as error:
        text = f"{path} cannot be written: {error.strerror}"
        return [problem(what, text, f"{remedy}: chmod u+w, or mount it read-write")]
    if free < _LEAST_FREE:
        return [problem(what, f"{path} has {_gib(free)} free", "Free some space, or use another")]
    return [ok(what, f"{path}, {_gib(free)} free")]


def gpus(trials: Trials | None, num_ranks: int, seconds: float) -> list[Finding]:
    """Check the GPUs of this machine, and, with trials, whether TensorFlow can use them."""
    nvidia, driver = _nvidia(seconds)
    if nvidia is None:
        return [problem("Driver", driver, "Check `nvidia-smi`; load the driver, or reboot")]
    seen = nvidia if trials is None else trials.gpus()
    if not nvidia and not seen:
        return [ok("GPUs", "none; ranks compute on the processor")]
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if trials is not None and hidden is not None and not seen:
        text = f"{len(nvidia)}, hidden by CUDA_VISIBLE_DEVICES={hidden!r}"
        return [note("GPUs", text, "unset CUDA_VISIBLE_DEVICES to use them")]
    found = [ok("GPUs", name) for name in nvidia or seen]
    if driver:
        found.append(ok("Driver", driver))
    if trials is not None and not seen:
        text = "TensorFlow finds none of them"
        if trials.is_built_with_cuda:
            text += ": the CUDA libraries that it requires are missing, or the driver is too old"
        else:
            text += ": it is built without CUDA"
        found.append(problem("GPUs", text, "pip install 'tensorflow[and-cuda]' of this version"))
    elif num_ranks > len(seen) and not shares_gpus():
        text = f"{len(seen)} for {num_ranks} ranks, each of which requires its own GPU"
        found.append(problem("GPUs", text, f"-np {len(seen)}, or CUDA_VISIBLE_DEVICES="))
    found += [ok("Attention", _ATTENTION)] if seen else []
    return [*found, *_nccl(driver, num_ranks), *_shared_memory(num_ranks)]


def _nccl(driver: str, num_ranks: int) -> list[Finding]:
    """Check what several ranks on GPUs require."""
    if num_ranks < 2:
        return []
    if "MIG" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        text = "parts of GPUs (MIG), on which several ranks are not supported"
        return [problem("GPUs", text, "-np 1, or disable MIG")]
    version = installed_version(NCCL)
    found = [ok("NCCL", f"{version}, of the package {NCCL}")] if version else []
    if not installed_version("horovod"):
        return found
    if not has_nccl():
        text = "built without NCCL: tensors of GPUs go through the memory of the host"
        command = "tfdist-install-horovod --gpu_operations=nccl, or tfdist-run --engine=tensorflow"
        return [*found, note("Horovod", text, command)]
    number = re.match(r"NVIDIA (\d+)", driver)
    if number and int(number[1]) < OLDEST_DRIVER:
        text = f"{driver}; Horovod with NCCL is built with CUDA 13, which requires {OLDEST_DRIVER}"
        found.append(problem("Driver", text, "Update the driver, or build with HOROVOD_CUDA_HOME"))
    return found


def tpus() -> list[Finding]:
    """Report that TensorFlow does not support the TPU of this machine, if there is one."""
    seen = [name for name in _TPU_VARIABLES if os.environ.get(name)] + glob.glob(_TPU_DEVICES)
    if not seen:
        return []
    why = why_no_tpu(installed_version("tensorflow") or "")
    if why:
        text, _, remedy = why.rpartition(". ")
        return [note("TPU", f"{seen[0]} is there, but {text}", remedy)]
    return [note("TPU", f"{seen[0]}: tfdist was not tested on TPUs", "see docs/launchers.md")]


def _nvidia(seconds: float) -> tuple[list[str] | None, str]:
    """The GPUs and the version of NVIDIA's driver; None and the reason if it does not work."""
    query = "--query-gpu=name,memory.total,driver_version"
    try:
        code, output, errors = answer_of(["nvidia-smi", query, "--format=csv,noheader"], seconds)
    except OSError:
        return [], ""  # No driver.
    if code is None:
        return None, f"nvidia-smi did not end within {seconds:g} s"
    if code:
        return None, f"nvidia-smi failed: {one_line(errors or output)}"
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line]
    names = [f"{name}, {size}" for name, size, _ in (row for row in rows if len(row) == 3)]
    return names, f"NVIDIA {rows[0][2]}" if rows and len(rows[0]) == 3 else ""


def _shared_memory(num_ranks: int) -> list[Finding]:
    """Check whether /dev/shm is large enough for NCCL, with several ranks on GPUs."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return []
    if num_ranks < 2 or size >= _LEAST_SHARED:
        return []
    text = f"{size >> 20} MiB, which is too small for NCCL between the ranks of a host"
    return [problem("/dev/shm", text, "docker run --shm-size=1g, or --ipc=host")]


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB"
