"""`HorovodStrategy`: ranks that horovodrun or mpirun started, with Horovod's collectives."""

from __future__ import annotations

from tfdist.collectives.engine import Engine
from tfdist.mesh import Mesh
from tfdist.strategies.devices import check_devices
from tfdist.strategies.parallel import WATCHDOG_SECONDS, ParallelStrategy, check_options, meeting


class HorovodStrategy(ParallelStrategy):
    """Parallel training over Horovod's Gloo, MPI or NCCL operations.

    ```python
    strategy = HorovodStrategy()  # in a script that `tfdist-run -np 4 -- python script.py` starts
    ```

    Args:
        mesh: The mesh of the ranks; all ranks are on the data axis by default.
        engine: A running `HorovodEngine`, in place of a new one for `mesh`.
        watchdog_seconds: As in `ParallelStrategy`; also the timeout of the rendezvous of the ranks.
        **options: Other options of `ParallelStrategy`.

    Raises:
        ImportError: Horovod is not installed.
        ValueError: The mesh does not match the number of ranks.
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        *,
        engine: Engine | None = None,
        watchdog_seconds: float = WATCHDOG_SECONDS,
        deterministic: bool = False,
        **options,
    ):
        options |= {"watchdog_seconds": watchdog_seconds, "deterministic": deterministic}
        check_options(mesh, engine, **options)
        if engine is None:
            from tfdist.collectives.horovod import start
            from tfdist.runtime.horovod_variables import started_by_horovod

            with meeting(started_by_horovod(), watchdog_seconds):
                engine = start(mesh, deterministic=deterministic)
                check_devices(engine)
        super().__init__(engine, **options)
