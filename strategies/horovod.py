"""`HorovodStrategy`: ranks that horovodrun or mpirun started, over Horovod."""

from __future__ import annotations

from tfdist.collectives.engine import Engine
from tfdist.mesh import Mesh
from tfdist.strategies.parallel import ParallelStrategy

__all__ = ["HorovodStrategy"]


class HorovodStrategy(ParallelStrategy):
    """Parallel training over Horovod's Gloo, MPI or NCCL operations.

    ```python
    strategy = HorovodStrategy()  # in a script that `tfdist-run -np 4 -- python script.py` starts
    ```

    Args:
        mesh: How the ranks are laid out; all on the data axis by default.
        engine: A `HorovodEngine` that already runs, in place of a new one for `mesh`.
        **options: Those of `ParallelStrategy`.

    Raises:
        ImportError: Horovod is not installed.
        ValueError: The mesh does not fill the world.
    """

    def __init__(self, mesh: Mesh | None = None, *, engine: Engine | None = None, **options):
        if engine is None:
            from tfdist.collectives.horovod import HorovodEngine

            engine = HorovodEngine(mesh)
        super().__init__(engine, **options)
