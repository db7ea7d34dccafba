"""The compiled library: where it lies, how it is built, how it is loaded."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from tfdist.runtime.digests import matches_digest, write_digest
from tfdist.runtime.sessions import run_in_session

__all__ = ["build", "find_library", "functions", "library_path", "load"]

_logger = logging.getLogger("tfdist")

_HERE = Path(__file__).parent
_SOURCES = (
    "activations.cc",
    "attention.cc",
    "cross_entropy.cc",
    "normalization.cc",
    "operations.cc",
    "peer.cc",
    "products.cc",
    "transport.cc",
    "updates.cc",
)
_HEADERS = ("exponential.h", "kernels.h", "peer.h", "transport.h")
_FLAGS = (
    "-shared",
    "-fPIC",
    "-O3",
    "-fopenmp-simd",  # Sums of a loop may be taken in parts.
    # A choice of two numbers is no branch: without AVX-512 loops of it would not be vectors.
    "-fno-trapping-math",
)


def library_path() -> Path:
    """Where the library for this TensorFlow, Python and source lies, or would lie."""
    digest = hashlib.sha256(tf.version.VERSION.encode() + sysconfig.get_platform().encode())
    for name in (*_SOURCES, *_HEADERS):
        digest.update((_HERE / name).read_bytes())
    digest.update(" ".join(_FLAGS).encode())
    return _HERE / f"tfdist-{digest.hexdigest()[:16]}.so"


def build(compiler: Sequence[str] = ("g++",)) -> Path:
    """Compiles the library unless it is there, and returns its path.

    Args:
        compiler: The command of a C++17 compiler.

    Raises:
        RuntimeError: The compiler failed; the message holds what it said.
        OSError: There is no compiler of that name, or the package's folder cannot be written.
    """
    path = library_path()
    if path.exists() and matches_digest(path):
        return path
    with tempfile.TemporaryDirectory(dir=_HERE, prefix="build-") as folder:
        made = Path(folder) / path.name
        finished = run_in_session(
            [
                *compiler,
                *_FLAGS,
                *tf.sysconfig.get_compile_flags(),
                *[str(_HERE / name) for name in _SOURCES],
                "-o",
                str(made),
                *tf.sysconfig.get_link_flags(),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        if finished.returncode:
            raise RuntimeError(f"{finished.stderr[-4000:]}\n{compiler[0]} failed, see above.")
        for old in (*_HERE.glob("tfdist-*.so"), *_HERE.glob("tfdist-*.so.sha256")):
            old.unlink()
        # In one step: another process finds the whole library or none.
        os.replace(made, path)
        write_digest(path)
    find_library.cache_clear()
    return path


@functools.cache
def find_library() -> Path | None:
    """The library, if it has been built and is as it was built; a line is logged if it is not."""
    path = library_path()
    if not path.exists():
        return None
    if not matches_digest(path):
        _logger.warning(
            "%s is not loaded: it does not match the digest of what was built. Run "
            "tfdist-install-horovod.",
            path,
        )
        return None
    return path


@functools.cache
def load():
    """Returns the module of operations that TensorFlow makes of the library.

    Raises:
        FileNotFoundError: It has not been built.
    """
    path = find_library()
    if path is None:
        raise FileNotFoundError(
            f"{library_path().name} has not been built for TensorFlow {tf.version.VERSION}, or is "
            "not as it was built: run tfdist-install-horovod."
        )
    return tf.load_op_library(str(path))


@functools.cache
def functions() -> ctypes.CDLL:
    """What the library offers to C; the same copy that TensorFlow has loaded.

    Raises:
        FileNotFoundError: It has not been built.
    """
    load()
    found = ctypes.CDLL(str(library_path()))
    found.tfdist_flush.argtypes = [ctypes.c_double]
    found.tfdist_begin_run.argtypes = [ctypes.c_int64]
    found.tfdist_begin_run.restype = None
    return found
