"""`HorovodStrategy`: ranks that horovodrun or mpirun started, with Horovod's collectives."""

from __future__ import annotations

from tfdist.collectives.engine import Engine
from tfdist.mesh import Mesh
from tfdist.strategies.devices import check_devices
from tfdist.strategies.options import checked_options
from tfdist.strategies.parallel import ParallelStrategy, meeting


class HorovodStrategy(ParallelStrategy):
    """Parallel training over Horovod's Gloo, MPI or NCCL operations.

    ```python
    strategy = HorovodStrategy()  # in a script that `tfdist-run -np 4 -- python script.py` starts
    ```

    Args:
        mesh: The mesh of the ranks; all ranks are on the data axis by default.
        engine: A running `HorovodEngine`, in place of a new one for `mesh`.
        **options: Those of `StrategyOptions`; `watchdog_seconds` is also the timeout of the rendezvous.

    Raises:
        ImportError: Horovod is not installed.
        ValueError: The mesh does not match the number of ranks.
    """

    def __init__(self, mesh: Mesh | None = None, *, engine: Engine | None = None, **options):
        given = checked_options(mesh, engine, options)
        if engine is None:
            from tfdist.collectives.horovod import start
            from tfdist.runtime.horovod_variables import started_by_horovod

            with meeting(started_by_horovod(), given.watchdog_seconds):
                engine = start(mesh, deterministic=given.deterministic)
                check_devices(engine)
        super().__init__(engine, **options)
