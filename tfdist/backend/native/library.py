"""A compiled library of TensorFlow operations: its path, how it is built and how it is loaded."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.runtime.digests import matches_digest, write_digest
from tfdist.runtime.sessions import run_in_session

_logger = logging.getLogger("tfdist")

_HERE = Path(__file__).parent
_FLAGS = (
    "-shared",
    "-fPIC",
    "-O3",
    "-fopenmp-simd",  # Sums of a loop may be taken in parts.
    # A choice of two numbers is no branch: without AVX-512 loops of it would not be vectors.
    "-fno-trapping-math",
)


class Library:
    """A library that `tfdist-install-horovod` builds next to its sources, for the TensorFlow that is installed.

    Args:
        folder: The folder of the sources: all its files *.cc.
        what: What the library is, for messages.
    """

    def __init__(self, folder: Path, what: str):
        self.what = what
        self._folder = folder
        self._sources = sorted(folder.glob("*.cc"))
        self._headers = sorted({*folder.glob("*.h"), *_HERE.glob("*.h")})
        self._found: tuple[Path | None] | None = None
        self._loaded: Any = None

    def path(self) -> Path:
        """Where the library for this TensorFlow, Python and source is, or would be."""
        digest = hashlib.sha256(tf.version.VERSION.encode() + sysconfig.get_platform().encode())
        for file in (*self._sources, *self._headers):
            digest.update(file.read_bytes())
        digest.update(" ".join(_FLAGS).encode())
        return self._folder / f"tfdist-{digest.hexdigest()[:16]}.so"

    def build(self, compiler: Sequence[str] = ("g++",)) -> Path:
        """Compiles the library unless it is there, and returns its path.

        Args:
            compiler: The command of a C++17 compiler.

        Raises:
            RuntimeError: The compiler failed; the message holds what it said.
            OSError: There is no compiler of that name, or the package's folder cannot be written.
        """
        path = self.path()
        if path.exists() and matches_digest(path):
            return path
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="build-") as folder:
            made = Path(folder) / path.name
            finished = run_in_session(
                [
                    *compiler,
                    *_FLAGS,
                    f"-I{_HERE}",
                    *tf.sysconfig.get_compile_flags(),
                    *map(str, self._sources),
                    "-o",
                    str(made),
                    *tf.sysconfig.get_link_flags(),
                ],
                stderr=subprocess.PIPE,
                text=True,
            )
            if finished.returncode:
                raise RuntimeError(f"{finished.stderr[-4000:]}\n{compiler[0]} failed, see above.")
            for old in (
                *self._folder.glob("tfdist-*.so"),
                *self._folder.glob("tfdist-*.so.sha256"),
            ):
                old.unlink()
            # In one step: another process finds the whole library or none.
            os.replace(made, path)
            write_digest(path)
        self._found = None
        return path

    def find(self) -> Path | None:
        """The library, if it has been built and is as it was built; a line is logged if it is not."""
        if self._found is None:
            path = self.path()
            if not path.exists():
                self._found = (None,)
            elif matches_digest(path):
                self._found = (path,)
            else:
                self._found = (None,)
                _logger.warning(
                    "%s is not loaded: it does not match the digest of what was built. Run "
                    "tfdist-install-horovod.",
                    path,
                )
        return self._found[0]

    def load(self) -> Any:
        """Returns the module of operations that TensorFlow makes of the library.

        Raises:
            FileNotFoundError: It has not been built.
        """
        if self._loaded is None:
            path = self.find()
            if path is None:
                raise FileNotFoundError(
                    f"{self.path().name} ({self.what}) has not been built for TensorFlow "
                    f"{tf.version.VERSION}, or is not as it was built: run tfdist-install-horovod."
                )
            self._loaded = tf.load_op_library(str(path))
        return self._loaded


#: Messages from rank to rank, and sums in a fixed order.
TRANSPORT = Library(_HERE, "transport")


def functions() -> ctypes.CDLL:
    """What the transport library offers to C; the same copy that TensorFlow has loaded.

    Raises:
        FileNotFoundError: It has not been built.
    """
    TRANSPORT.load()
    found = ctypes.CDLL(str(TRANSPORT.path()))
    found.tfdist_flush.argtypes = [ctypes.c_double]
    found.tfdist_begin_run.argtypes = [ctypes.c_int64]
    found.tfdist_begin_run.restype = None
    return found
