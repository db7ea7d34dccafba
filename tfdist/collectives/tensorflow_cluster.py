"""Has this process join the cluster of TF_CONFIG: TensorFlow can do so once.

`tf.distribute.MultiWorkerMirroredStrategy` is made for that; its own variables and reductions,
which Keras 3 cannot use, are not used.

`Context.configure_coordination_service` is TensorFlow's own: no public call says how long a worker
may be silent. `tests/collectives/test_tensorflow_cluster.py` fails where it moves.
"""

from __future__ import annotations

import signal
import threading

import tensorflow as tf
from tensorflow.python.eager import context

from tfdist.runtime.confine import confine
from tfdist.runtime.tf_config import read_tf_config

try:
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
except ImportError:  # TensorFlow 2.18 has it elsewhere.
    from tensorflow.tsl.protobuf import coordination_config_pb2

#: Of silence, until TensorFlow takes a worker for dead. After its own 10 s a cable that was pulled
#: for a moment would end the job; who is dead or frozen is for tfdist's watchdog to say.
_SILENT_SECONDS = 600

_cluster: tf.distribute.MultiWorkerMirroredStrategy | None = None


def bring_up_cluster(communication: str) -> None:
    """Joins the cluster, unless this process has joined it before.

    Args:
        communication: "auto", "ring" or "nccl".

    Raises:
        RuntimeError: TensorFlow has already run operations, or no cluster is named.
    """
    global _cluster
    if _cluster is not None:
        return
    options = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation(communication.upper())
    )
    config = read_tf_config()
    if config is None:
        raise RuntimeError("TF_CONFIG, which names the cluster, is not set.")
    _be_patient(config.jobs)
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        # Kept for the life of the process: it owns the server that the peers talk to.
        _cluster = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except RuntimeError as error:
        raise RuntimeError(
            "TensorFlow has already run operations in this process, and can join a cluster only "
            "before its first. Make the strategy at the start of the program, before any tensor, "
            f"model or data set. TensorFlow said: {error}"
        ) from error
    host, _, port = config.workers[config.index].rpartition(":")
    confine(int(port), host)
    # TensorFlow's notifier of preemptions catches SIGTERM from here on and tells nobody: a rank
    # that is told to end would train on.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_terminate or signal.SIG_DFL)


def _be_patient(jobs: dict[str, int]) -> None:
    """Sets how long a worker may be silent; MultiWorkerMirroredStrategy leaves it as it is then."""
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{next(iter(jobs))}/replica:0/task:0",
        heartbeat_timeout_in_ms=1000 * _SILENT_SECONDS,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=count)
            for job, count in jobs.items()
        ],
    )
