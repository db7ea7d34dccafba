"""Builds Horovod for the TensorFlow that is installed, keeps the wheel, and proves it.

Horovod's last release does not compile against today's TensorFlow as it comes: one of its files
includes XLA headers that have moved since. The code that needs them is left out of every build
without a GPU, so empty files under the old names are all that the compiler asks for. Nothing of
Horovod is patched.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tfdist.launch.horovod_prerequisites import (
    GLOO_ONLY,
    BuildOptions,
    PrerequisiteError,
    check_interpreter,
    check_toolchain,
    installed_version,
    with_scripts,
)
from tfdist.launch.native_build import install_native
from tfdist.launch.quiet import quiet_start
from tfdist.runtime.digests import matches_digest, write_digest
from tfdist.runtime.sessions import run_in_session
from tfdist.utils.errors import TfdistError

HOROVOD_VERSION = "0.28.1"

#: The extra `horovod-build` of this package: the build runs in the interpreter's own environment,
#: where TensorFlow is, so pip does not fetch these for it.
BUILD_REQUIREMENTS = (
    "cloudpickle>=3.0",
    "packaging>=23",
    "psutil>=5.9",
    "pyyaml>=6",
    "setuptools>=77",
    "wheel",
)
_LOG_LINES = 30
#: A line of the log that is longer is a call of the compiler with its 100 flags.
_CALL_LENGTH = 1000
_PROOF_SECONDS = 120.0

#: What horovod/tensorflow/xla_mpi_ops.cc includes, in its order, before it asks for a GPU.
_XLA_HEADERS = (
    "tensorflow/compiler/tf2xla/xla_op_kernel.h",
    "tensorflow/compiler/tf2xla/xla_op_registry.h",
    "tensorflow/compiler/xla/client/xla_builder.h",
    "tensorflow/compiler/xla/service/custom_call_target_registry.h",
    "tensorflow/compiler/xla/service/hlo.pb.h",
    "tensorflow/compiler/xla/shape.h",
    "tensorflow/compiler/xla/xla_data.pb.h",
)
#: In a GPU build the first of them hides the GPU from the rest of that one file: the operations
#: stay, their XLA variants are left out.
_HIDE_GPU = "#undef HAVE_GPU\n#undef HAVE_CUDA\n#undef HAVE_ROCM\n"
#: horovod/tensorflow/mpi_ops.cc calls a function that TensorFlow no longer has.
_STREAM_HEADER = "tensorflow/compiler/xla/stream_executor/stream.h"
_STREAM_VALUE = """\
#pragma once
#include_next <tensorflow/compiler/xla/stream_executor/stream.h>
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
}  // namespace gpu
}  // namespace stream_executor
"""
#: Horovod's variables that say where things lie. All others choose what is built, which is for
#: `BuildOptions` to say, since the cache goes by them.
_PLACES = (
    "HOROVOD_BUILD_ARCH_FLAGS",
    "HOROVOD_BUILD_CUDA_CC_LIST",
    "HOROVOD_CMAKE",
    "HOROVOD_CUDA_HOME",
    "HOROVOD_NCCL_HOME",
    "HOROVOD_NCCL_INCLUDE",
    "HOROVOD_NCCL_LIB",
    "HOROVOD_NCCL_LINK",
    "HOROVOD_NVTX_INCLUDE",
)


class BuildError(TfdistError, RuntimeError):
    """The compiler, pip or the new build itself failed."""


def install(
    options: BuildOptions = GLOO_ONLY,
    cache_dir: Path = Path("~/.cache/tfdist/wheels"),
    *,
    force: bool = False,
) -> None:
    """Builds Horovod unless it was built before, installs it, and proves it on two ranks.

    Args:
        options: What to build.
        cache_dir: Where wheels are kept.
        force: Whether to build even where a wheel is kept.

    Raises:
        PrerequisiteError: Something is missing that the user has to install.
        BuildError: The build, the installation or the proof failed.
    """
    wheel = build(options, cache_dir, force=force)
    # Not beside the wheel: a cache that others have filled may be read-only.
    descriptor, log = tempfile.mkstemp(prefix="tfdist-install-horovod-", suffix=".log")
    os.close(descriptor)
    _pip("install", "--no-deps", "--force-reinstall", str(wheel), log=Path(log))
    os.unlink(log)
    importlib.invalidate_caches()
    _say(f"Installed it into {sys.prefix}.")
    _say(install_native(cache_dir, force=force))
    prove(options)


def build(
    options: BuildOptions = GLOO_ONLY,
    cache_dir: Path = Path("~/.cache/tfdist/wheels"),
    *,
    force: bool = False,
) -> Path:
    """Returns a wheel of Horovod for the installed TensorFlow; takes the arguments of `install`."""
    tensorflow = check_interpreter()
    kept = cache_dir.expanduser().absolute() / cache_key(options, tensorflow)
    wheel = find_wheel(kept)
    if wheel and not force and not matches_digest(wheel):
        _say(f"{wheel} does not match the digest of what was built: it is built again.")
        force = True
    if wheel and not force:
        _say(f"Horovod {HOROVOD_VERSION} for {' '.join(tensorflow)} was built before: {wheel}")
        return wheel
    check_toolchain(options)
    try:
        kept.mkdir(parents=True, exist_ok=True)
        log = kept / "build.log"
        log.write_bytes(b"")
    except OSError as error:
        raise PrerequisiteError(
            f"The folder for wheels cannot be written: {error}. Name another with --cache_dir."
        ) from error
    _say(
        f"Building Horovod {HOROVOD_VERSION} for {' '.join(tensorflow)} with "
        f"{', '.join(options.carriers)}: takes 3 to 5 minutes on 2 cores. Log: {log}"
    )
    start = time.monotonic()
    with (
        # The compiler's flags are split at spaces, which the path of the cache may have.
        tempfile.TemporaryDirectory(prefix="tfdist-headers-") as headers,
        # Beside its place, so that the finished wheel is moved there in one step.
        tempfile.TemporaryDirectory(prefix="build-", dir=kept) as wheels,
    ):
        write_headers(Path(headers), options)
        _pip("install", *BUILD_REQUIREMENTS, log=log)
        _pip(
            "wheel",
            # Writes the compiler's output to the log while it comes.
            "--verbose",
            "--no-deps",
            "--no-build-isolation",
            # pip keeps wheels by name and version: it would hand out one for another TensorFlow.
            "--no-cache-dir",
            "--no-binary=horovod",
            f"--wheel-dir={wheels}",
            f"horovod=={HOROVOD_VERSION}",
            log=log,
            environment=build_environment(Path(headers), options),
        )
        built = find_wheel(Path(wheels))
        if built is None:
            raise BuildError(f"pip left no wheel in {wheels}. The whole log: {log}")
        for old in (*kept.glob("*.whl"), *kept.glob("*.whl.sha256")):
            old.unlink()
        wheel = built.replace(kept / built.name)
        write_digest(wheel)
    _say(f"Built {wheel} in {time.monotonic() - start:.0f} s.")
    return wheel


def prove(options: BuildOptions | None = None) -> None:
    """Runs an all-reduce of the installed Horovod on two ranks of this machine, on the CPU.

    Where `options` are given, Horovod must have been built with them.

    Raises:
        PrerequisiteError: Horovod is not installed.
        BuildError: A rank failed or hung, the sum is wrong, or something is not built in.
    """
    with quiet_start():
        from tfdist.testing import RankError, run_ranks

    if not installed_version("horovod"):
        raise PrerequisiteError(
            f"Horovod is not installed for {sys.executable}: run this without --check."
        )
    start = time.monotonic()
    try:
        answers = run_ranks(_sum_over_ranks, num_ranks=2, engine="horovod", timeout=_PROOF_SECONDS)
    except (ImportError, RankError, TimeoutError) as error:
        raise BuildError(f"Horovod is installed, but two ranks cannot use it: {error}") from error
    expected = [3.0 * index for index in range(1000)]
    for rank, (total, carriers, _) in enumerate(answers):
        if total != expected:
            wrong = next(i for i, value in enumerate(expected) if total[i] != value)
            raise BuildError(
                f"Horovod adds wrongly: element {wrong} of the sum is {expected[wrong]}. "
                f"Received on rank {rank}: {total[wrong]}."
            )
        lacking = sorted(set(options.carriers if options else ()) - set(carriers))
        if lacking:
            raise BuildError(
                f"Horovod was built without {', '.join(lacking)}: build it again with --force. "
                f"Received: {', '.join(carriers)}."
            )
    _say(
        f"Tested: 2 ranks on this CPU got the right sum ({time.monotonic() - start:.0f} s). "
        f"Built with {', '.join(answers[0][1])}; latency-critical tensors go "
        f"{'peer to peer' if answers[0][2] else 'through Horovod'}."
    )


def _sum_over_ranks() -> tuple[list[float], tuple[str, ...], bool]:
    """A rank of the proof; returns the sum, what its Horovod has, and if messages go peer to peer."""
    import tensorflow as tf

    from tfdist.collectives.horovod import import_horovod
    from tfdist.collectives.p2p import P2PEngine
    from tfdist.testing import engine

    horovod = import_horovod()
    world = engine()
    # Horovod itself, also where messages would go peer to peer.
    own = world.inner if isinstance(world, P2PEngine) else world
    total = own.all_reduce(tf.range(1000.0) * (world.rank + 1.0), world.group(), "sum", "proof")
    built = {"gloo": horovod.gloo_built, "mpi": horovod.mpi_built, "nccl": horovod.nccl_built}
    return (
        total.numpy().tolist(),
        tuple(name for name, is_built in built.items() if is_built()),
        isinstance(world, P2PEngine),
    )


def cache_key(options: BuildOptions, tensorflow: tuple[str, str]) -> str:
    """The name of the folder that keeps the wheel of a build: all that the wheel depends on."""
    return "_".join(
        [
            f"horovod-{HOROVOD_VERSION}",
            "-".join(tensorflow),
            str(sys.implementation.cache_tag),
            sysconfig.get_platform(),
            "-".join(options.carriers),
        ]
    )


def find_wheel(folder: Path) -> Path | None:
    """Returns the wheel in a folder, if there is one."""
    return next(iter(sorted(folder.glob(f"horovod-{HOROVOD_VERSION}-*.whl"))), None)


def write_headers(folder: Path, options: BuildOptions) -> None:
    """Writes the headers that stand in for those that TensorFlow has moved or changed."""
    contents = dict.fromkeys(_XLA_HEADERS, "")
    if options.gpu_operations == "nccl":
        contents[_XLA_HEADERS[0]] = _HIDE_GPU
        contents[_STREAM_HEADER] = _STREAM_VALUE
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def build_environment(
    headers: Path, options: BuildOptions, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The variables for a build with the headers in a folder that `write_headers` filled."""
    result = {
        name: value
        for name, value in with_scripts(environment).items()
        if name in _PLACES or not name.startswith("HOROVOD_")
    }
    # Its mere presence adds Intel's oneCCL to the build.
    result.pop("CCL_ROOT", None)
    result |= {
        "CXXFLAGS": f"-I{headers} {result.get('CXXFLAGS', '')}".strip(),
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if options.mpi else "HOROVOD_WITHOUT_MPI": "1",
        # Horovod asks for eight jobs unless make is told otherwise.
        "CMAKE_GENERATOR": "Unix Makefiles",
        "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
        # The Gloo in the sdist names a version of CMake that CMake 4 no longer plays.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if options.gpu_operations == "nccl":
        result["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return result


def _pip(*arguments: str, log: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Runs pip with its output at the end of the log; a `BuildError` holds the end of the log."""
    with open(log, "ab") as output:
        finished = run_in_session(
            [sys.executable, "-P", "-m", "pip", *arguments],
            env={
                **environment,
                "PIP_DISABLE_PIP_VERSION_CHECK": "1",
                "PIP_NO_INPUT": "1",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if finished.returncode:
        text = log.read_text(errors="replace")
        if "CalledProcessError" in text:
            # Below what the compiler said stand the Python calls through which pip reached it.
            text = text.rpartition("Traceback (most recent call last)")[0] or text
        tail = [
            line if len(line) < _CALL_LENGTH else f"{line[:100]} [...]"
            for line in text.rstrip().splitlines()[-_LOG_LINES:]
        ]
        raise BuildError(
            "\n".join([*tail, f"`pip {arguments[0]}` failed, see above. The whole log: {log}"])
        )


def _say(line: str) -> None:
    print(line, flush=True)
