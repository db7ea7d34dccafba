"""A compiled library of TensorFlow operations: its path and import."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import sysconfig
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfdist.runtime.digests import matches_digest

_logger = logging.getLogger("tfdist")

#: The folder of the headers that libraries share.
HERE = Path(__file__).parent
#: The flags with which a library is compiled, in addition to those of TensorFlow.
FLAGS = (
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
        self.folder = folder
        self.sources = sorted(folder.glob("*.cc"))
        self._headers = sorted({*folder.glob("*.h"), *HERE.glob("*.h")})
        self._found: tuple[Path | None] | None = None
        self._loaded: Any = None

    def path(self) -> Path:
        """The path of the library for this TensorFlow, platform and source, whether it exists or not."""
        digest = hashlib.sha256(tf.version.VERSION.encode() + sysconfig.get_platform().encode())
        for file in (*self.sources, *self._headers):
            digest.update(file.read_bytes())
        digest.update(" ".join(FLAGS).encode())
        return self.folder / f"tfdist-{digest.hexdigest()[:16]}.so"

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
TRANSPORT = Library(HERE, "transport")


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
