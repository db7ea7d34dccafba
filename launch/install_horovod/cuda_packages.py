"""CUDA's compiler and NCCL from PyPI, for a build with NCCL on a machine without a CUDA toolkit or a GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from tfdist.launch.install_horovod.prerequisites import PrerequisiteError, installed_version
from tfdist.runtime.horovod_variables import find_nccl

#: The compiler and what Horovod's one file of GPU kernels includes. CUDA 12's package lacks the compiler.
_CUDA = "13.0"
COMPILER = tuple(
    f"{name}=={_CUDA}.*"
    for name in (
        "nvidia-cuda-nvcc",
        "nvidia-cuda-crt",
        "nvidia-nvvm",
        "nvidia-cuda-runtime",
        "nvidia-cuda-cccl",
    )
)
#: TensorFlow's NCCL, as `tensorflow[and-cuda]` requires it.
NCCL, NCCL_RANGE = "nvidia-nccl-cu12", ">=2.27.7,<3"
#: Its counterpart for CUDA 13 has its files in the same folder.
_OTHER_NCCL = "nvidia-nccl-cu13"
#: The architectures of current GPUs, from Turing on, the oldest that this compiler knows.
ARCHITECTURES = "75,80,86,89,90,100,120"
#: The oldest driver for CUDA 13.
OLDEST_DRIVER = 580
_DRIVER = Path("/proc/driver/nvidia/version")


def check_packages() -> None:
    """Checks that NCCL is only installed once.

    Raises:
        PrerequisiteError: The packages for two versions of CUDA are installed, which share their files.
    """
    if installed_version(NCCL) and installed_version(_OTHER_NCCL):
        raise PrerequisiteError(
            f"{NCCL} and {_OTHER_NCCL} cannot be installed together, since they have the same files. Run "
            f"`pip uninstall {_OTHER_NCCL}` and `pip install --force-reinstall {NCCL}`."
        )


def versions() -> tuple[str, ...]:
    """What a wheel depends on: the architectures, and the versions of CUDA and NCCL."""
    architectures = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", ARCHITECTURES)
    cuda = os.environ.get("HOROVOD_CUDA_HOME", _CUDA).strip("/").replace("/", "-")
    nccl = os.environ.get("HOROVOD_NCCL_HOME", installed_version(NCCL) or "none")
    return (
        f"cuda{cuda}",
        f"nccl{nccl.strip('/').replace('/', '-')}",
        architectures.replace(",", "."),
    )


def build_variables(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Horovod's variables for a build with the compiler in a folder and the installed NCCL.

    Places that the user has set are not replaced.

    Args:
        folder: The target of pip's installation of `COMPILER`, in which links are made.
        environment: The variables of the user.
    """
    found = {"HOROVOD_BUILD_CUDA_CC_LIST": ARCHITECTURES, "HOROVOD_NCCL_LINK": "SHARED"}
    if "HOROVOD_CUDA_HOME" not in environment:
        home = folder / "nvidia" / f"cu{_CUDA.partition('.')[0]}"
        _link(home / "lib64", home / "lib")
        _link(home / "lib" / "libcudart.so", next((home / "lib").glob("libcudart.so.*")))
        found |= {"HOROVOD_CUDA_HOME": str(home), "CUDACXX": str(home / "bin" / "nvcc")}
    nccl = find_nccl()
    if nccl is not None and not any(name.startswith("HOROVOD_NCCL_") for name in environment):
        # The package has no link by the name for which compilers look.
        own = folder / "nccl"
        (own / "lib").mkdir(parents=True, exist_ok=True)
        _link(own / "include", nccl / "include")
        _link(own / "lib" / "libnccl.so", nccl / "lib" / "libnccl.so.2")
        found["HOROVOD_NCCL_HOME"] = str(own)
    return {name: value for name, value in found.items() if name not in environment}


def _link(path: Path, target: Path) -> None:
    if not path.exists():
        path.symlink_to(target)


def driver_version() -> int | None:
    """The major version of NVIDIA's driver; None without one."""
    if not _DRIVER.exists():
        return None
    found = re.search(r"Kernel Module\D*(\d+)\.", _DRIVER.read_text())
    return int(found[1]) if found else None
