"""`tfdist-install-horovod`: build Horovod for the installed TensorFlow, and test it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from absl import flags

from tfdist.launch.flags import command
from tfdist.launch.flags.values import FlagDefiner, folder, refuse_ignored
from tfdist.launch.install_horovod.build import HOROVOD_VERSION, BuildError, install, prove
from tfdist.launch.install_horovod.prerequisites import BuildOptions, PrerequisiteError
from tfdist.launch.signals import exit_on_signals

_VALUES = flags.FlagValues()
_define = FlagDefiner(_VALUES)
_MPI = _define.boolean("mpi", False, "Build with the installed MPI in addition to Gloo")
_GPU_OPERATIONS = _define.enum(
    "gpu_operations", "none", ["none", "nccl"], "Library for collectives on NVIDIA GPUs; untested"
)
_CACHE_DIR = _define.string("cache_dir", "~/.cache/tfdist/wheels", "Folder of cached wheels")
_FORCE = _define.boolean("force", False, "Build even if a wheel is cached")
_CHECK = _define.boolean("check", False, "Only test the installed Horovod")


def run() -> None:
    """Run the console script."""
    PROGRAM.run()


def _check(_: list[str]) -> None:
    if _CHECK.value:
        building = (_MPI, _GPU_OPERATIONS, _CACHE_DIR, _FORCE)
        why = "cannot be combined with --check, which builds nothing"
        refuse_ignored(_VALUES, building, why, "--check")
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
        said = "MultiWorkerStrategy does not require Horovod."
        raise command.UsageError(f"{error} ({said})") from None
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
    summary=f"Builds Horovod {HOROVOD_VERSION} for the installed TensorFlow, installs it, and tests it "
    "with an all-reduce on two ranks. Requires a C++ compiler, CMake and make.",
    check=_check,
)


if __name__ == "__main__":
    run()
