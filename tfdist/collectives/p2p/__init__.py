"""Messages straight from rank to rank, for what a layer waits for.

The compiled library (`tfdist.native`) holds a socket to each rank that this one works with, and
gives TensorFlow operations to send and to receive a named tensor; `exchange` makes collectives of
them. It moves tensors in the memory of the host; where a process has a GPU, the engine's own
operations do all the work.
"""

from tfdist.collectives.p2p.connections import close, connect, flush, traffic
from tfdist.collectives.p2p.engine import Direct

__all__ = ["Direct", "close", "connect", "flush", "traffic"]
