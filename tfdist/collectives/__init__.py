"""Collective communication over the groups of a mesh, differentiable, on any engine.

Engines: `tfdist.collectives.horovod` (Horovod process sets), `tfdist.collectives.tensorflow`
(TensorFlow's own ring) and `tfdist.collectives.local` (one rank). A strategy makes its engine;
`strategy.group("data")` is how programs come to a `Group`.
"""

from tfdist.collectives.engine import Engine
from tfdist.collectives.group import Group
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
    "Engine",
    "Group",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "recv",
    "reduce_scatter",
    "send",
]
