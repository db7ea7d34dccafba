"""The engine of a single process: one rank, no communication."""

from __future__ import annotations

from tfdist.collectives.engine import Engine
from tfdist.mesh import Mesh
from tfdist.utils import checks


class LocalEngine(Engine):
    """One rank. Every group has one member, so the result of an operation is its input.

    `tfdist.collectives` handles groups of one without an engine; these are the same results for direct
    calls of an engine.
    """

    name = "local"

    def __init__(self, mesh: Mesh | None = None):
        checks.instance("mesh", mesh, Mesh, "a tfdist.Mesh", optional=True)
        super().__init__((mesh or Mesh()).resolve(size=1, rank=0))

    def all_to_all_uneven(self, tensor, splits, group, name):
        """The tensor and its splits."""
        return tensor, splits

    def _unchanged(self, tensor, *_):
        return tensor

    all_reduce = all_gather = all_gather_uneven = reduce_scatter = _unchanged
    all_to_all = broadcast = _unchanged
