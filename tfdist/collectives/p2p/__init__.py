"""Peer-to-peer messages between ranks, for latency-critical operations.

The compiled library (`tfdist.backend.native`) has a socket to each rank with which this one communicates,
and provides TensorFlow operations to send and to receive a named tensor; `P2PEngine` implements collectives
with them. It sends tensors in the memory of the host; for those in the memory of a GPU the engine's own
operations are used.
"""

from tfdist.collectives.p2p.connections import with_p2p
from tfdist.collectives.p2p.engine import P2PEngine, flush

__all__ = ["P2PEngine", "flush", "with_p2p"]
