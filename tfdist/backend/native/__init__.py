"""What only C++ can do: messages from rank to rank, sums in a fixed order, layers in one pass.

A library of TensorFlow operations and a few functions, which `tfdist-install-horovod` builds for the
TensorFlow that is installed. Everything works without it: collectives go by way of the engine, and
layers by TensorFlow's own kernels.
"""

from tfdist.backend.kernels import has_kernels, may_take_kernels, taking_kernels
from tfdist.backend.native.library import build, find_library, functions, library_path, load

__all__ = [
    "build",
    "find_library",
    "functions",
    "taking_kernels",
    "has_kernels",
    "library_path",
    "load",
    "may_take_kernels",
]
