"""Peer-to-peer messages between ranks, for latency-critical operations.

The compiled library (`tfdist.backend.native`) holds a socket to each rank that this one works with, and
gives TensorFlow operations to send and to receive a named tensor; `P2PEngine` makes collectives of
them. It moves tensors in the memory of the host; where a process has a GPU, the engine's own
operations do all the work.
"""

from tfdist.collectives.p2p.connections import traffic, with_p2p
from tfdist.collectives.p2p.engine import P2PEngine, flush

__all__ = ["P2PEngine", "flush", "traffic", "with_p2p"]
