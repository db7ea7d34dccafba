"""`MultiWorkerStrategy`: the workers of TF_CONFIG, over TensorFlow's own collectives."""

from __future__ import annotations

from tfdist.collectives.engine import Engine
from tfdist.collectives.tensorflow import COMMUNICATIONS
from tfdist.mesh import Mesh
from tfdist.strategies.devices import pin_gpu
from tfdist.strategies.parallel import (
    WATCHDOG_SECONDS,
    ParallelStrategy,
    check_options,
    meeting,
    notice_one_rank,
)
from tfdist.utils import checks


class MultiWorkerStrategy(ParallelStrategy):
    """What `tf.distribute.MultiWorkerMirroredStrategy` is to Keras 2, for Keras 3.

    Needs no Horovod and no compiler. Make it before any other use of TensorFlow in the process:
    TensorFlow joins a cluster before its first operation or not at all.

    Args:
        mesh: How the workers are laid out; all on the data axis by default.
        engine: A `TensorFlowEngine` that already runs, in place of a new one for `mesh`.
        communication: "auto", "ring" or "nccl", for a new engine.
        p2p: Whether operations go peer to peer, in groups of up to 8 ranks on CPUs.
            `tfdist-install-horovod` builds the library for it.
        watchdog_seconds: As in `ParallelStrategy`; also how long the ranks may take to meet.
        **options: Others of `ParallelStrategy`.

    Raises:
        ValueError: TF_CONFIG is malformed, or the mesh does not fill the cluster.
        RuntimeError: TensorFlow was used before.
    """

    def __init__(
        self,
        mesh: Mesh | None = None,
        *,
        engine: Engine | None = None,
        communication: str = "auto",
        p2p: bool = False,
        watchdog_seconds: float = WATCHDOG_SECONDS,
        **options,
    ):
        checks.one_of("communication", communication, COMMUNICATIONS)
        options |= {"watchdog_seconds": watchdog_seconds}
        check_options(mesh, engine, **options)
        checks.boolean("p2p", p2p)
        if engine is None:
            from tfdist.collectives.p2p import with_p2p
            from tfdist.collectives.tensorflow import TensorFlowEngine
            from tfdist.runtime.tf_config import started_by_tf_config

            notice_one_rank(started_by_tf_config())
            pin_gpu()
            with meeting(watchdog_seconds):
                engine = TensorFlowEngine(mesh, communication)
                if p2p:
                    engine = with_p2p(engine)
        super().__init__(engine, **options)
