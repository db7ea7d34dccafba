"""Collective communication over the groups of a mesh, differentiable, on any engine.

Engines: `tfdist.collectives.horovod` (Horovod process sets), `tfdist.collectives.tensorflow`
(TensorFlow's own ring) and `tfdist.collectives.local` (one rank). A strategy creates its engine;
`strategy.group("data")` returns a `Group`.
"""

from tfdist.collectives.group import Group
from tfdist.collectives.objects import all_gather_object, broadcast_object
from tfdist.collectives.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    recv,
    reduce_scatter,
    send,
)

__all__ = [
    "Group",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "recv",
    "reduce_scatter",
    "send",
]
