"""The ranks that step together: those that share a model, and optionally those of a host."""

from __future__ import annotations

import socket

import tensorflow as tf

from tfdist.collectives.engine import Engine
from tfdist.collectives.objects import all_gather_object


def ranks_in_step(engine: Engine, within: str | None) -> frozenset[int]:
    """The ranks that reduce gradients with this one at every step. It is a collective.

    Args:
        engine: The engine.
        within: None for only those that share this rank's model; "host" for all whose models are on
            the same hosts, or an axis of the mesh for all ranks along it.

    Raises:
        ValueError: `within` is an axis whose ranks share a model.
    """
    mesh = engine.mesh
    apart = mesh.replica_axes
    if within not in (None, "host", *apart):
        raise ValueError(
            f"`within` must be None, 'host' or one of the axes {apart} of the mesh, along which each rank "
            f"has its own model. Received: within={within!r} on {mesh!r}."
        )
    together = [axis for axis in mesh.shape if axis not in apart]
    if within != "host":
        return frozenset(mesh.group(*together, *([] if within is None else [within])))
    with tf.init_scope():
        hosts = all_gather_object(socket.gethostname(), engine.group(), name="hosts")
    # For each replica of the model, its ranks and their hosts, in order.
    replicas = {rank: mesh.group(*together, rank=rank) for rank in range(mesh.size)}
    own = [hosts[rank] for rank in replicas[mesh.rank]]
    return frozenset(
        rank for rank, ranks in replicas.items() if [hosts[each] for each in ranks] == own
    )
