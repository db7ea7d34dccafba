"""Messages straight from rank to rank, for what a layer waits for.

A small library in C++ (`transport.cc`) holds a socket to each rank that this one works with, and
gives TensorFlow two operations, to send and to receive a named tensor; `exchange` makes
collectives of them. `tfdist-install-horovod` builds it. It moves tensors in the memory of the
host; where a process has a GPU, the engine's own operations do all the work.
"""

from tfdist.collectives.direct.connections import close, connect, flush, traffic
from tfdist.collectives.direct.exchange import Direct
from tfdist.collectives.direct.library import build, library_path

__all__ = ["Direct", "build", "close", "connect", "flush", "library_path", "traffic"]
