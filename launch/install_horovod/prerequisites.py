"""Prerequisites of a build of Horovod: TensorFlow, a compiler, CMake, make."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping

from tfdist.utils.errors import TfdistError

_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly", "tf-nightly-cpu")
_COMPILERS = ("c++", "g++", "clang++")
_OLDEST_CMAKE = (3, 13)


class PrerequisiteError(TfdistError, RuntimeError):
    """A missing prerequisite, which the user has to install or to name."""


@dataclasses.dataclass(frozen=True)
class BuildOptions:
    """The options of a build, which always includes Gloo.

    Attributes:
        mpi: Whether to build with the MPI that is installed.
        gpu_operations: "none", or "nccl" for collectives on NVIDIA GPUs.
    """

    mpi: bool = False
    gpu_operations: str = "none"

    def __post_init__(self):
        if self.gpu_operations not in ("none", "nccl"):
            raise ValueError(
                f"`gpu_operations` must be 'none' or 'nccl'. Received: {self.gpu_operations!r}."
            )

    @property
    def carriers(self) -> tuple[str, ...]:
        """The names of the communication libraries."""
        nccl = self.gpu_operations == "nccl"
        return ("gloo", *(["mpi"] if self.mpi else []), *(["nccl"] if nccl else []))


#: The default options.
GLOO_ONLY = BuildOptions()


def check_interpreter() -> tuple[str, str]:
    """Return the name and version of the installed TensorFlow distribution.

    Raises:
        PrerequisiteError: The platform cannot run Horovod, or TensorFlow or pip is missing.
    """
    if sys.platform not in ("linux", "darwin"):
        raise PrerequisiteError(f"Horovod requires Linux or macOS. Received: {sys.platform}.")
    # From the installer's records, because importing TensorFlow takes seconds.
    found = [name for name in _TENSORFLOWS if installed_version(name)]
    if not found:
        raise PrerequisiteError(
            f"TensorFlow is not installed for {sys.executable}. Run `pip install tensorflow` first."
        )
    if importlib.util.find_spec("pip") is None:
        raise PrerequisiteError(
            f"pip is not installed for {sys.executable}. Run `{sys.executable} -m ensurepip` first."
        )
    return found[0], str(installed_version(found[0]))


def find_compiler(environment: Mapping[str, str]) -> list[str]:
    """The command of the C++ compiler in CXX, or of the first on PATH; empty if there is none."""
    named = shlex.split(environment.get("CXX", ""))
    which = functools.partial(shutil.which, path=environment["PATH"])
    return named or [name for name in _COMPILERS if which(name)][:1]


def check_toolchain(options: BuildOptions, environment: Mapping[str, str] = os.environ) -> None:
    """Check that the programs and headers for a build are installed.

    Raises:
        PrerequisiteError: One is missing; the message explains how to install it.
    """
    environment = with_scripts(environment)
    which = functools.partial(shutil.which, path=environment["PATH"])
    named = shlex.split(environment.get("CXX", ""))
    if named and not which(named[0]):
        raise PrerequisiteError(
            "The C++ compiler in the variable CXX could not be found: correct or unset it. "
            f"Received: CXX={environment['CXX']}."
        )
    if not find_compiler(environment):
        raise PrerequisiteError(
            "Horovod requires a C++ compiler, which was not found: `apt install g++`, "
            "`dnf install gcc-c++` or `xcode-select --install`, or name yours in the variable CXX."
        )
    cmake = which(environment.get("HOROVOD_CMAKE", "cmake"))
    if not cmake:
        raise PrerequisiteError(
            "Horovod requires CMake, which was not found: `pip install cmake`, `apt install cmake` or "
            "`brew install cmake`."
        )
    version = _cmake_version(cmake, environment)
    if version < _OLDEST_CMAKE:
        raise PrerequisiteError(
            f"Horovod requires CMake {'.'.join(map(str, _OLDEST_CMAKE))}: `pip install cmake`. "
            f"Received: {'.'.join(map(str, version)) or 'no version'} from {cmake}."
        )
    if not which("make"):
        raise PrerequisiteError(
            "Horovod requires make, which was not found: `apt install make` or `dnf install make`."
        )
    if options.mpi and not (which("mpicxx") or which("mpic++")):
        raise PrerequisiteError(
            "--mpi requires MPI's compiler, but mpicxx was not found: `apt install libopenmpi-dev`, "
            "or add the bin folder of your MPI to PATH."
        )
    home = environment.get("HOROVOD_CUDA_HOME")
    if options.gpu_operations == "nccl" and home and not shutil.which("nvcc", path=f"{home}/bin"):
        raise PrerequisiteError(
            "The CUDA toolkit in HOROVOD_CUDA_HOME must have bin/nvcc. Received: "
            f"HOROVOD_CUDA_HOME={home}. Correct it, or unset it for the compiler from PyPI."
        )


def _cmake_version(cmake: str, environment: Mapping[str, str]) -> tuple[int, ...]:
    answer = subprocess.run(
        [cmake, "--version"], env=dict(environment), capture_output=True, text=True, check=False
    )
    found = re.search(r"version\s+(\d+)\.(\d+)", answer.stdout)
    return tuple(map(int, found.groups())) if found else ()


def with_scripts(environment: Mapping[str, str]) -> dict[str, str]:
    """Add this interpreter's scripts, such as those of `pip install cmake`, to PATH."""
    path = environment.get("PATH", os.defpath)
    return {**environment, "PATH": f"{path}{os.pathsep}{sysconfig.get_path('scripts')}"}


def installed_version(distribution: str) -> str | None:
    """The version of a distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
