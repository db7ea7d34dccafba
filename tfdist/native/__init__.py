"""What only C++ can do: messages from rank to rank, sums in a fixed order, counts of memory.

A library of TensorFlow operations and a few functions, which `tfdist-install-horovod` builds for the
TensorFlow that is installed. Everything works without it: collectives go by way of the engine, and
memory is seen by the operating system alone.
"""

from tfdist.native.library import build, functions, library_path, load

__all__ = ["build", "functions", "library_path", "load"]
