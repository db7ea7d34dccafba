"""`MultiWorkerStrategy`: the workers of TF_CONFIG, with TensorFlow's collectives."""

from __future__ import annotations

from tfdist.collectives.engine import Engine
from tfdist.collectives.tensorflow import COMMUNICATIONS
from tfdist.mesh import Mesh
from tfdist.strategies.devices import check_devices
from tfdist.strategies.options import checked_options
from tfdist.strategies.parallel import ParallelStrategy, meeting
from tfdist.utils import checks


class MultiWorkerStrategy(ParallelStrategy):
    """The counterpart for Keras 3 of `tf.distribute.MultiWorkerMirroredStrategy` for Keras 2.

    Requires neither Horovod nor a compiler. Create it before any other use of TensorFlow in the process:
    TensorFlow can join a cluster only before its first operation.

    Args:
        mesh: The mesh of the workers; all workers are on the data axis by default.
        engine: A running `TensorFlowEngine`, in place of a new one for `mesh`.
        communication: "auto", "ring" or "nccl", for a new engine.
        p2p: Whether to use peer-to-peer collectives, in groups of up to 8 ranks on CPUs.
            `tfdist-install-horovod` builds the library for them.
        **options: Those of `StrategyOptions`; `watchdog_seconds` is also the timeout of the rendezvous.

    Raises:
        ValueError: TF_CONFIG is malformed, or the mesh does not match the number of workers.
        RuntimeError: TensorFlow was used before.
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        *,
        engine: Engine | None = None,
        communication: str = "auto",
        p2p: bool = False,
        **options,
    ):
        checks.one_of("communication", communication, COMMUNICATIONS)
        given = checked_options(mesh, engine, options)
        checks.boolean("p2p", p2p)
        if engine is None:
            from tfdist.collectives.p2p import with_p2p
            from tfdist.collectives.tensorflow import TensorFlowEngine
            from tfdist.runtime.tf_config import started_by_tf_config

            with meeting(started_by_tf_config(), given.watchdog_seconds):
                engine = TensorFlowEngine(mesh, communication)
                if p2p:
                    engine = with_p2p(engine)
                check_devices(engine)
        super().__init__(engine, **options)
