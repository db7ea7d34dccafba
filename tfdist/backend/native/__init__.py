"""The transport library: messages between ranks, and sums in a fixed order, in C++.

`tfdist-install-horovod` builds it for the installed TensorFlow. Without it collectives use the engine.
"""

from tfdist.backend.native.library import TRANSPORT, Library, functions

__all__ = ["TRANSPORT", "Library", "functions"]
