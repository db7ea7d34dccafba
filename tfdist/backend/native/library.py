"""A compiled library of TensorFlow operations: its path, build and import."""

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
    "-fopenmp-simd",  # Allows reordered sums in loops that are marked for it.
    # Without AVX-512 loops with a conditional expression would not be vectorized.
    "-fno-trapping-math",
)


class Library:
    """A library that `tfdist-install-horovod` builds next to its sources, for the installed TensorFlow.

    Args:
        folder: The folder of the sources, *.cc.
        what: A name of the library, for messages.
    """

    def __init__(self, folder: Path, what: str):
        self.what = what
        self._folder = folder
        self._sources = sorted(folder.glob("*.cc"))
        self._headers = sorted({*folder.glob("*.h"), *_HERE.glob("*.h")})
        self._found: tuple[Path | None] | None = None
        self._loaded: Any = None

    def path(self) -> Path:
        """The path of the library for this TensorFlow, platform and source, whether it exists or not."""
        digest = hashlib.sha256(tf.version.VERSION.encode() + sysconfig.get_platform().encode())
        for file in (*self._sources, *self._headers):
            digest.update(file.read_bytes())
        digest.update(" ".join(_FLAGS).encode())
        return self._folder / f"tfdist-{digest.hexdigest()[:16]}.so"

    def build(self, compiler: Sequence[str] = ("g++",)) -> Path:
        """Compiles the library unless it exists, and returns its path.

        Args:
            compiler: The command of a C++17 compiler.

        Raises:
            RuntimeError: The compiler failed; the message contains its output.
            OSError: The compiler was not found, or the package's folder is not writable.
        """
        path = self.path()
        if path.exists() and matches_digest(path):
            return path
        with tempfile.TemporaryDirectory(dir=self._folder, prefix="build-") as folder:
            made = Path(folder) / path.name
            flags = [*_FLAGS, f"-I{_HERE}", *tf.sysconfig.get_compile_flags()]
            files = [*map(str, self._sources), "-o", str(made), *tf.sysconfig.get_link_flags()]
            command = [*compiler, *flags, *files]
            finished = run_in_session(command, stderr=subprocess.PIPE, text=True)
            if finished.returncode:
                raise RuntimeError(f"{finished.stderr[-4000:]}\n{compiler[0]} failed, see above.")
            for pattern in ("tfdist-*.so", "tfdist-*.so.sha256"):
                for old in self._folder.glob(pattern):
                    old.unlink()
            # Atomically: another process finds the complete library or none.
            os.replace(made, path)
            write_digest(path)
        self._found = None
        return path

    def find(self) -> Path | None:
        """The library, if it has been built and matches its digest; a mismatch is logged."""
        if self._found is None:
            path = self.path()
            is_intact = path.exists() and matches_digest(path)
            self._found = (path if is_intact else None,)
            if path.exists() and not is_intact:
                _logger.warning(
                    "%s is not loaded: it does not match its digest. Run tfdist-install-horovod.",
                    path,
                )
        return self._found[0]

    def load(self) -> Any:
        """Returns the module of operations that TensorFlow creates from the library.

        Raises:
            FileNotFoundError: The library has not been built, or was changed.
        """
        if self._loaded is None:
            path = self.find()
            if path is None:
                raise FileNotFoundError(
                    f"{self.path().name} ({self.what}) was not found for TensorFlow "
                    f"{tf.version.VERSION}, or does not match its digest. Run tfdist-install-horovod."
                )
            self._loaded = tf.load_op_library(str(path))
        return self._loaded


#: Messages between ranks, and sums in a fixed order.
TRANSPORT = Library(_HERE, "transport")


def functions() -> ctypes.CDLL:
    """The C functions of the transport library; the same copy that TensorFlow has loaded.

    Raises:
        FileNotFoundError: The library has not been built, or was changed.
    """
    TRANSPORT.load()
    found = ctypes.CDLL(str(TRANSPORT.path()))
    found.tfdist_flush.argtypes = [ctypes.c_double]
    found.tfdist_begin_run.argtypes = [ctypes.c_int64]
    found.tfdist_begin_run.restype = None
    return found
