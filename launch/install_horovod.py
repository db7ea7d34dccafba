"""`tfdist-install-horovod`: builds Horovod for the TensorFlow that is installed, and proves it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from absl import flags

from tfdist.launch import command
from tfdist.launch.flag_values import folder, refuse_ignored
from tfdist.launch.horovod_build import HOROVOD_VERSION, BuildError, install, prove
from tfdist.launch.horovod_prerequisites import BuildOptions, PrerequisiteError

__all__ = ["PROGRAM", "run"]

_VALUES = flags.FlagValues()
_MPI = flags.DEFINE_bool(
    "mpi", False, "Build with the MPI that is installed, besides Gloo.", flag_values=_VALUES
)
_GPU_OPERATIONS = flags.DEFINE_enum(
    "gpu_operations",
    "none",
    ["none", "nccl"],
    "Collectives on NVIDIA GPUs; untested on a GPU.",
    flag_values=_VALUES,
)
_CACHE_DIR = flags.DEFINE_string(
    "cache_dir", "~/.cache/tfdist/wheels", "Where built wheels are kept.", flag_values=_VALUES
)
_FORCE = flags.DEFINE_bool("force", False, "Build also where a wheel is kept.", flag_values=_VALUES)
_CHECK = flags.DEFINE_bool(
    "check", False, "Build nothing: prove what is installed.", flag_values=_VALUES
)


def run() -> None:
    """The console script."""
    PROGRAM.run()


def _check(_: list[str]) -> None:
    if _CHECK.value:
        building = (_MPI, _GPU_OPERATIONS, _CACHE_DIR, _FORCE)
        refuse_ignored(_VALUES, building, "is for building, which --check does not", "--check")
    folder("cache_dir", _CACHE_DIR.value)


def _main(_: None) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    options = BuildOptions(mpi=_MPI.value, gpu_operations=_GPU_OPERATIONS.value)
    try:
        if _CHECK.value:
            prove()
        else:
            install(options, Path(_CACHE_DIR.value), force=_FORCE.value)
        return 0
    except PrerequisiteError as error:
        raise command.UsageError(f"{error} (MultiWorkerStrategy trains without Horovod.)") from None
    except BuildError as error:
        said, code = str(error), 1
    except KeyboardInterrupt:
        said, code = "Stopped.", 130
    print(f"tfdist-install-horovod: {said}", file=sys.stderr)
    return code


PROGRAM = command.Program(
    _main,
    _VALUES,
    usage="tfdist-install-horovod [flags]",
    summary=f"Builds Horovod {HOROVOD_VERSION} for the TensorFlow that is installed, installs it, "
    "and proves it with an all-reduce on two ranks. Needs a C++ compiler, CMake and make.",
    check=_check,
)


if __name__ == "__main__":
    run()
