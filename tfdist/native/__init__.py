"""What only C++ can do: messages from rank to rank, and sums in a fixed order.

A library of TensorFlow operations and a few functions, which `tfdist-install-horovod` builds for the
TensorFlow that is installed. Everything works without it: collectives go by way of the engine.
"""

from tfdist.native.library import build, functions, library_path, load

__all__ = ["build", "functions", "library_path", "load"]
