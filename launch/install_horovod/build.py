"""Build Horovod for the installed TensorFlow, cache the wheel, and test it.

Horovod's last release does not compile against current TensorFlow: one of its files includes XLA
headers that have since moved. Builds without a GPU exclude the code that requires them, so empty files
with the old names suffice. Horovod is not patched.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tfdist.launch.flags.quiet import quiet_start
from tfdist.launch.install_horovod import cuda_packages
from tfdist.launch.install_horovod.digests import write_digest
from tfdist.launch.install_horovod.native_build import install_native
from tfdist.launch.install_horovod.prerequisites import (
    GLOO_ONLY,
    BuildOptions,
    PrerequisiteError,
    check_interpreter,
    check_toolchain,
    installed_version,
    with_scripts,
)
from tfdist.launch.sessions import run_in_session
from tfdist.runtime.digests import matches_digest
from tfdist.runtime.horovod_variables import find_nccl
from tfdist.utils.errors import TfdistError

HOROVOD_VERSION = "0.28.1"

#: The extra `horovod-build` of this package: the build runs in the interpreter's environment, which has
#: TensorFlow, so pip does not install build requirements.
BUILD_REQUIREMENTS = (
    "cloudpickle>=3.0",
    "packaging>=23",
    "psutil>=5.9",
    "pyyaml>=6",
    "setuptools>=77",
    "wheel",
)
_LOG_LINES = 30
#: Longer lines of the log are calls of the compiler with its 100 flags.
_CALL_LENGTH = 1000
_PROOF_SECONDS = 120.0

#: The headers that horovod/tensorflow/xla_mpi_ops.cc includes, in order, before it checks for a GPU.
_XLA_HEADERS = (
    "tensorflow/compiler/tf2xla/xla_op_kernel.h",
    "tensorflow/compiler/tf2xla/xla_op_registry.h",
    "tensorflow/compiler/xla/client/xla_builder.h",
    "tensorflow/compiler/xla/service/custom_call_target_registry.h",
    "tensorflow/compiler/xla/service/hlo.pb.h",
    "tensorflow/compiler/xla/shape.h",
    "tensorflow/compiler/xla/xla_data.pb.h",
)
#: In a GPU build the first of these headers hides the GPU from the rest of that file, which excludes the
#: XLA variants of the operations.
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
#: Horovod's variables for paths. Its other variables select build options, which `BuildOptions` does
#: instead, because the cache key depends on them.
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
    """A failure of the compiler, of pip or of the new build."""


def install(
    options: BuildOptions = GLOO_ONLY,
    cache_dir: Path = Path("~/.cache/tfdist/wheels"),
    *,
    force: bool = False,
) -> None:
    """Build Horovod unless a wheel is cached, install it, and test it on two ranks.

    Args:
        options: The build options.
        cache_dir: Folder of cached wheels.
        force: Whether to build even if a wheel is cached.

    Raises:
        PrerequisiteError: A prerequisite is missing, which the user has to install.
        BuildError: The build, the installation or the test failed.
    """
    wheel = build(options, cache_dir, force=force)
    # Not next to the wheel, because a shared cache may be read-only.
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
    """Return a wheel of Horovod for the installed TensorFlow.

    Args:
        options: As in `install`.
        cache_dir: As in `install`.
        force: As in `install`.

    Raises:
        PrerequisiteError: As in `install`.
        BuildError: The build failed.
    """
    tensorflow = check_interpreter()
    if options.gpu_operations == "nccl":
        _require_nccl(options)
    kept = cache_dir.expanduser().absolute() / cache_key(options, tensorflow)
    wheel = find_wheel(kept)
    if wheel and not force and not matches_digest(wheel):
        _say(f"{wheel} does not match its digest: rebuilding it.")
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
            f"The folder for wheels cannot be written: {error}. Use another --cache_dir."
        ) from error
    _say(
        f"Building Horovod {HOROVOD_VERSION} for {' '.join(tensorflow)} with "
        f"{', '.join(options.carriers)}, which takes 3 to 5 minutes on 2 cores. Log: {log}"
    )
    start = time.monotonic()
    with (
        contextlib.ExitStack() as stack,
        # The compiler's flags are split at spaces, which the path of the cache may contain.
        tempfile.TemporaryDirectory(prefix="tfdist-headers-") as headers,
        # In the same folder, so that the finished wheel is moved atomically.
        tempfile.TemporaryDirectory(prefix="build-", dir=kept) as wheels,
    ):
        write_headers(Path(headers), options)
        _pip("install", *BUILD_REQUIREMENTS, log=log)
        environment = build_environment(Path(headers), options)
        if options.gpu_operations == "nccl":
            toolkit = stack.enter_context(tempfile.TemporaryDirectory(prefix="tfdist-cuda-"))
            if "HOROVOD_CUDA_HOME" not in environment:
                target = ("--no-deps", f"--target={toolkit}")
                _pip("install", *target, *cuda_packages.COMPILER, log=log)
            environment |= cuda_packages.build_variables(Path(toolkit), environment)
        _pip(
            "wheel",
            # Writes the compiler's output to the log immediately.
            "--verbose",
            "--no-deps",
            "--no-build-isolation",
            # pip caches wheels by name and version, and would use one for another TensorFlow.
            "--no-cache-dir",
            "--no-binary=horovod",
            f"--wheel-dir={wheels}",
            f"horovod=={HOROVOD_VERSION}",
            log=log,
            environment=environment,
        )
        built = find_wheel(Path(wheels))
        if built is None:
            raise BuildError(f"pip did not produce a wheel in {wheels}. Full log: {log}")
        for old in (*kept.glob("*.whl"), *kept.glob("*.whl.sha256")):
            old.unlink()
        wheel = built.replace(kept / built.name)
        write_digest(wheel)
    _say(f"Built {wheel} in {time.monotonic() - start:.0f} s.")
    return wheel


def _require_nccl(options: BuildOptions) -> None:
    """Install the NCCL that TensorFlow uses, which Horovod needs too, unless it is there or the user has another."""
    cuda_packages.check_packages()
    is_named = any(name.startswith("HOROVOD_NCCL_") for name in os.environ)
    if not is_named and find_nccl() is None:
        check_toolchain(options)  # Without NCCL there is no wheel in the cache either.
        _say(f"Installing {cuda_packages.NCCL}, which TensorFlow uses on GPUs.")
        with tempfile.TemporaryDirectory(prefix="tfdist-install-horovod-") as folder:
            package = f"{cuda_packages.NCCL}{cuda_packages.NCCL_RANGE}"
            _pip("install", "--no-deps", package, log=Path(folder, "pip.log"))
        importlib.invalidate_caches()
    driver = cuda_packages.driver_version()
    if driver is not None and driver < cuda_packages.OLDEST_DRIVER:
        _say(
            f"The NVIDIA driver {driver} is older than {cuda_packages.OLDEST_DRIVER}, which this build requires: "
            "update the driver, or name a CUDA 12 toolkit in HOROVOD_CUDA_HOME."
        )


def prove(options: BuildOptions | None = None) -> None:
    """Test the installed Horovod by an all-reduce on two ranks of this machine, on the CPU.

    Args:
        options: The options that Horovod must have been built with; None for any.

    Raises:
        PrerequisiteError: Horovod is not installed.
        BuildError: A rank failed or hung, the sum is wrong, or a library is not built in.
    """
    with quiet_start():
        from tfdist.testing import RankError, run_ranks

    if not installed_version("horovod"):
        raise PrerequisiteError(
            f"Horovod is not installed for {sys.executable}. Run this without --check."
        )
    start = time.monotonic()
    try:
        answers = run_ranks(_sum_over_ranks, num_ranks=2, engine="horovod", timeout=_PROOF_SECONDS)
    except (ImportError, RankError, TimeoutError) as error:
        raise BuildError(f"Two ranks cannot use the installed Horovod: {error}") from error
    expected = [3.0 * index for index in range(1000)]
    for rank, (total, carriers, _) in enumerate(answers):
        if total != expected:
            wrong = next(i for i, value in enumerate(expected) if total[i] != value)
            raise BuildError(
                f"Horovod did not compute the right sum: element {wrong} must be {expected[wrong]}. "
                f"Received: {total[wrong]} on rank {rank}."
            )
        lacking = sorted(set(options.carriers if options else ()) - set(carriers))
        if lacking:
            raise BuildError(
                f"Horovod must be built with {', '.join(lacking)}. Received: a build with "
                f"{', '.join(carriers)}. Rebuild it with --force."
            )
    _say(
        f"Tested: 2 ranks on this CPU computed the right sum ({time.monotonic() - start:.0f} s). "
        f"Built with {', '.join(answers[0][1])}; latency-critical tensors are sent "
        f"{'peer to peer' if answers[0][2] else 'through Horovod'}."
    )


def _sum_over_ranks() -> tuple[list[float], tuple[str, ...], bool]:
    """Run a rank of the test: the sum, the built-in libraries, and whether messages are peer to peer."""
    import tensorflow as tf

    from tfdist.collectives.horovod import import_horovod
    from tfdist.collectives.p2p import P2PEngine
    from tfdist.testing import engine

    horovod = import_horovod()
    world = engine()
    # Horovod's engine, even if messages would be peer to peer.
    own = world.inner if isinstance(world, P2PEngine) else world
    total = own.all_reduce(tf.range(1000.0) * (world.rank + 1.0), world.group(), "sum", "proof")
    built = {"gloo": horovod.gloo_built, "mpi": horovod.mpi_built, "nccl": horovod.nccl_built}
    return (
        total.numpy().tolist(),
        tuple(name for name, is_built in built.items() if is_built()),
        isinstance(world, P2PEngine),
    )


def cache_key(options: BuildOptions, tensorflow: tuple[str, str]) -> str:
    """The name of the folder of a cached wheel, with everything that the wheel depends on."""
    return "_".join(
        [
            f"horovod-{HOROVOD_VERSION}",
            "-".join(tensorflow),
            str(sys.implementation.cache_tag),
            sysconfig.get_platform(),
            "-".join(options.carriers),
            *(cuda_packages.versions() if options.gpu_operations == "nccl" else []),
        ]
    )


def find_wheel(folder: Path) -> Path | None:
    """The wheel in a folder, or None."""
    return next(iter(sorted(folder.glob(f"horovod-{HOROVOD_VERSION}-*.whl"))), None)


def write_headers(folder: Path, options: BuildOptions) -> None:
    """Write the headers that replace those that TensorFlow has moved or changed."""
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
    """The environment variables for a build with the headers of `write_headers`."""
    result = {
        name: value
        for name, value in with_scripts(environment).items()
        if name in _PLACES or not name.startswith("HOROVOD_")
    }
    # CCL_ROOT would add Intel's oneCCL to the build.
    result.pop("CCL_ROOT", None)
    result |= {
        "CXXFLAGS": f"-I{headers} {result.get('CXXFLAGS', '')}".strip(),
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if options.mpi else "HOROVOD_WITHOUT_MPI": "1",
        # Horovod uses eight jobs by default.
        "CMAKE_GENERATOR": "Unix Makefiles",
        "MAKEFLAGS": f"-j{os.cpu_count() or 1}",
        # Gloo in the sdist requires a policy version that CMake 4 no longer supports.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if options.gpu_operations == "nccl":
        result["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return result


def _pip(*arguments: str, log: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Run pip and append its output to the log; a `BuildError` contains the end of the log."""
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
            # The compiler's output is followed by a traceback of pip, which is omitted.
            text = text.rpartition("Traceback (most recent call last)")[0] or text
        tail = [
            line if len(line) < _CALL_LENGTH else f"{line[:100]} [...]"
            for line in text.rstrip().splitlines()[-_LOG_LINES:]
        ]
        raise BuildError(
            "\n".join([*tail, f"`pip {arguments[0]}` failed, see above. Full log: {log}"])
        )


def _say(line: str) -> None:
    print(line, flush=True)
