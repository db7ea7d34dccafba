"""The engine of a process on its own: one rank, nobody to talk to."""

from __future__ import annotations

from tfdist.collectives.engine import Engine
from tfdist.mesh import Mesh
from tfdist.utils import checks


class LocalEngine(Engine):
    """One rank. Every group has one member, so an operation's result is its input.

    `tfdist.collectives` answers for groups of one by itself; what is left here are the same
    answers for those who call an engine directly.
    """

    name = "local"

    def __init__(self, mesh: Mesh | None = None):
        checks.instance("mesh", mesh, Mesh, "a tfdist.Mesh", optional=True)
        super().__init__((mesh or Mesh()).resolve(size=1, rank=0))

    def all_reduce(self, tensor, group, reduction, name):
        """The tensor."""
        return tensor

    def all_gather(self, tensor, group, name):
        """The tensor."""
        return tensor

    def all_gather_uneven(self, tensor, group, name):
        """The tensor."""
        return tensor

    def reduce_scatter(self, tensor, group, reduction, name):
        """The tensor."""
        return tensor

    def all_to_all(self, tensor, group, name):
        """The tensor."""
        return tensor

    def all_to_all_uneven(self, tensor, splits, group, name):
        """The tensor and its splits."""
        return tensor, splits

    def broadcast(self, tensor, root, group, name):
        """The tensor."""
        return tensor
