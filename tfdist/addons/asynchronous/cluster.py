"""The servers and workers of a job: those of TF_CONFIG, or servers inside this process."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist.runtime.confine import confine
from tfdist.runtime.rendezvous import free_ports
from tfdist.runtime.tf_config import read_tf_config


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of an asynchronous training job.

    Attributes:
        servers: "host:port" of each parameter server.
        num_workers: The number of workers.
        job: "ps" for a server, "worker" for a worker.
        index: The index of this process in its job. Worker 0 is the chief.
    """

    servers: tuple[str, ...]
    num_workers: int
    job: str
    index: int


def cluster_from_environment() -> Cluster | None:
    """The cluster of TF_CONFIG, if it has parameter servers.

    A task "chief" counts as the first worker.

    Raises:
        ValueError: TF_CONFIG is set but is not the JSON that TensorFlow describes.
    """
    config = read_tf_config()
    if config is None or not config.servers:
        return None
    return Cluster(config.servers, len(config.workers), config.job, config.index)


def local_cluster(num_servers: int) -> tuple[Cluster, list[tf.distribute.Server]]:
    """A cluster of this process alone: one worker, and servers that run in its threads.

    Args:
        num_servers: The number of servers.

    Returns:
        The cluster and the servers.
    """
    cluster = Cluster(
        tuple(f"127.0.0.1:{port}" for port in free_ports(num_servers)), 1, "worker", 0
    )
    return cluster, [start_server(cluster, index) for index in range(num_servers)]


def start_server(cluster: Cluster, index: int) -> tf.distribute.Server:
    """Starts TensorFlow's server of one `ps` task in this process.

    Where the system supports it, only connections to the address in the cluster are accepted.
    """
    spec = tf.train.ClusterSpec({"ps": list(cluster.servers)})
    server = tf.distribute.Server(spec, job_name="ps", task_index=index)
    host, _, port = cluster.servers[index].rpartition(":")
    confine(int(port), host)
    return server
