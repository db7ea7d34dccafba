"""`tfdist-install-horovod`: build Horovod for the installed TensorFlow, and test it."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

from tfdist.launch.flags import command
from tfdist.launch.flags.options import define_flags, names, option, refuse_ignored
from tfdist.launch.flags.values import folder
from tfdist.launch.install_horovod.build import HOROVOD_VERSION, BuildError, install, prove
from tfdist.launch.install_horovod.prerequisites import BuildOptions, PrerequisiteError
from tfdist.launch.signals import exit_on_signals


@dataclasses.dataclass(frozen=True)
class InstallOptions:
    """The options of the program; see the flags of the same names."""

    mpi: bool = option(False, "Build with the installed MPI in addition to Gloo")
    gpu_operations: str = option(
        "none",
        "Library for collectives on NVIDIA GPUs; nccl needs no CUDA toolkit; untested on GPUs",
        choices=("none", "nccl"),
    )
    cache_dir: str = option("~/.cache/tfdist/wheels", "Folder of cached wheels")
    force: bool = option(False, "Build even if a wheel is cached")
    check: bool = option(False, "Only test the installed Horovod")


_FLAGS = define_flags(InstallOptions)


def run() -> None:
    """Run the console script."""
    PROGRAM.run()


def _check(_: list[str]) -> InstallOptions:
    options = _FLAGS.read()
    if options.check:
        building = names(InstallOptions, without=["check"])
        why = "cannot be combined with --check, which builds nothing"
        refuse_ignored(options, building, why, "--check")
    folder("cache_dir", options.cache_dir)
    return options


def _main(options: InstallOptions) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    build = BuildOptions(mpi=options.mpi, gpu_operations=options.gpu_operations)
    try:
        with exit_on_signals():
            if options.check:
                prove()
            else:
                install(build, Path(options.cache_dir), force=options.force)
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
    _FLAGS.values,
    usage="tfdist-install-horovod [flags]",
    summary=f"Builds Horovod {HOROVOD_VERSION} for the installed TensorFlow, installs it, and tests it "
    "with an all-reduce on two ranks. Requires a C++ compiler, CMake and make.",
    check=_check,
)


if __name__ == "__main__":
    run()
