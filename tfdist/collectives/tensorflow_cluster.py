"""Has this process join the cluster of TF_CONFIG, which TensorFlow supports once per process.

`tf.distribute.MultiWorkerMirroredStrategy` is only created for that purpose; its variables and
reductions, which Keras 3 does not support, are not used.

`Context.configure_coordination_service` is internal to TensorFlow: there is no public function for the
timeout of a silent worker. `tests/collectives/test_tensorflow_cluster.py` fails if it changes.
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

#: The time after which TensorFlow considers a silent worker dead. With its default of 10 s a short
#: network failure would end the job; dead and frozen ranks are detected by tfdist's watchdog.
_SILENT_SECONDS = 600

_cluster: tf.distribute.MultiWorkerMirroredStrategy | None = None


def bring_up_cluster(communication: str) -> None:
    """Joins the cluster, unless this process has joined it before.

    Args:
        communication: "auto", "ring" or "nccl".

    Raises:
        RuntimeError: TensorFlow has already run operations, or TF_CONFIG is not set.
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
    # MultiWorkerMirroredStrategy does not change the service if it is configured.
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{next(iter(config.jobs))}/replica:0/task:0",
        heartbeat_timeout_in_ms=1000 * _SILENT_SECONDS,
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=job, num_tasks=count)
            for job, count in config.jobs.items()
        ],
    )
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        # Kept for the life of the process: it owns the server to which the peers are connected.
        _cluster = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    except RuntimeError as error:
        raise RuntimeError(
            "TensorFlow has already run operations in this process, and cannot join a cluster any "
            "more. Create the strategy at the start of the program, before any tensor, model or "
            f"dataset. The error was: {error}"
        ) from error
    host, _, port = config.workers[config.index].rpartition(":")
    confine(int(port), host)
    # From here on TensorFlow's preemption notifier catches SIGTERM without an effect: a rank that
    # receives it would continue to train.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_terminate or signal.SIG_DFL)
