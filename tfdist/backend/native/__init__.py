"""The transport library: messages from rank to rank, and sums in a fixed order, in C++.

`tfdist-install-horovod` builds it for the TensorFlow that is installed. Without it collectives go
through the engine.
"""

from tfdist.backend.native.library import TRANSPORT, Library, functions

__all__ = ["TRANSPORT", "Library", "functions"]
