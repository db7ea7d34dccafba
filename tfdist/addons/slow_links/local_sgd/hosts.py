"""Which ranks stay in step: those that share a model, and those of a host where that is asked for."""

from __future__ import annotations

import socket

import tensorflow as tf

from tfdist.collectives.engine import Engine
from tfdist.collectives.objects import all_gather_object


def ranks_in_step(engine: Engine, within: str | None) -> frozenset[int]:
    """The ranks that reduce gradients with this one at every step; all ranks call this.

    Args:
        engine: The engine.
        within: None for those alone that share this rank's model; "host" for all whose models lie
            on the same hosts, or an axis of the mesh for all that differ along it.

    Raises:
        ValueError: `within` is an axis whose ranks do not have models of their own.
    """
    mesh = engine.mesh
    apart = mesh.replica_axes
    if within not in (None, "host", *apart):
        raise ValueError(
            f"`within` is None, 'host' or one of the axes {apart} of the mesh, whose ranks each have a "
            f"model of their own. Received: within={within!r} on {mesh!r}."
        )
    together = [axis for axis in mesh.shape if axis not in apart]
    if within != "host":
        return frozenset(mesh.group(*together, *([] if within is None else [within])))
    with tf.init_scope():
        hosts = all_gather_object(socket.gethostname(), engine.group(), name="hosts")
    # Of each replica of the model, its ranks and their hosts, in the order of their places in it.
    replicas = {rank: mesh.group(*together, rank=rank) for rank in range(mesh.size)}
    own = [hosts[rank] for rank in replicas[mesh.rank]]
    return frozenset(
        rank for rank, ranks in replicas.items() if [hosts[each] for each in ranks] == own
    )
