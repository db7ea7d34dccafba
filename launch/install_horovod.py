"""`tfdist-install-horovod`: builds Horovod for the TensorFlow that is installed, and proves it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from absl import flags

from tfdist.launch import command
from tfdist.launch.flag_values import FlagDefiner, folder, refuse_ignored
from tfdist.launch.horovod_build import HOROVOD_VERSION, BuildError, install, prove
from tfdist.launch.horovod_prerequisites import BuildOptions, PrerequisiteError
from tfdist.runtime.sessions import exit_on_signals

_VALUES = flags.FlagValues()
_define = FlagDefiner(_VALUES)
_MPI = _define.boolean("mpi", False, "Builds with the installed MPI as well as Gloo")
_GPU_OPERATIONS = _define.enum(
    "gpu_operations", "none", ["none", "nccl"], "Library for collectives on NVIDIA GPUs; untested"
)
_CACHE_DIR = _define.string("cache_dir", "~/.cache/tfdist/wheels", "Folder that keeps built wheels")
_FORCE = _define.boolean("force", False, "Builds even if a wheel is kept")
_CHECK = _define.boolean("check", False, "Only tests the installed Horovod")


def run() -> None:
    """The console script."""
    PROGRAM.run()


def _check(_: list[str]) -> None:
    if _CHECK.value:
        building = (_MPI, _GPU_OPERATIONS, _CACHE_DIR, _FORCE)
        refuse_ignored(_VALUES, building, "is for a build, and --check builds nothing", "--check")
    folder("cache_dir", _CACHE_DIR.value)


def _main(_: None) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    options = BuildOptions(mpi=_MPI.value, gpu_operations=_GPU_OPERATIONS.value)
    try:
        with exit_on_signals():
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
    except SystemExit as error:
        said, code = "Stopped.", int(error.code or 0)
    print(f"tfdist-install-horovod: {said}", file=sys.stderr)
    return code


PROGRAM = command.Program(
    _main,
    _VALUES,
    usage="tfdist-install-horovod [flags]",
    summary=f"Builds Horovod {HOROVOD_VERSION} for the TensorFlow that is installed, installs it, "
    "and tests it with an all-reduce on two ranks. Needs a C++ compiler, CMake and make.",
    check=_check,
)


if __name__ == "__main__":
    run()
