"""`LocalStrategy`: a single process."""

from __future__ import annotations

from tfdist.collectives.engine import Engine
from tfdist.collectives.local import LocalEngine
from tfdist.mesh import Mesh
from tfdist.strategies.options import checked_options
from tfdist.strategies.parallel import ParallelStrategy


class LocalStrategy(ParallelStrategy):
    """One rank, for scripts that are written for many.

    Args:
        mesh: A mesh of one rank.
        engine: A `LocalEngine`, in place of a new one.
        **options: Those of `StrategyOptions`.

    Raises:
        ValueError: The mesh has more than one rank.
    """

    def __init__(self, mesh: Mesh | None = None, *, engine: Engine | None = None, **options):
        checked_options(mesh, engine, options)
        super().__init__(LocalEngine(mesh) if engine is None else engine, **options)
