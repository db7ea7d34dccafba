"""`LocalStrategy`: this process alone."""

from __future__ import annotations

from tfdist.collectives.engine import Engine
from tfdist.collectives.local import LocalEngine
from tfdist.mesh import Mesh
from tfdist.strategies.parallel import ParallelStrategy, check_options


class LocalStrategy(ParallelStrategy):
    """One rank: a script that is written for many runs as it is.

    Args:
        mesh: A mesh of one rank.
        engine: A `LocalEngine`, in place of a new one.
        **options: Those of `ParallelStrategy`.

    Raises:
        ValueError: The mesh wants more than one rank.
    """

    def __init__(self, mesh: Mesh | None = None, *, engine: Engine | None = None, **options):
        check_options(mesh, engine, **options)
        super().__init__(LocalEngine(mesh) if engine is None else engine, **options)
