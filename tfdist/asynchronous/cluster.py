"""Who takes part: the servers and the workers of TF_CONFIG, or servers inside of this process."""

from __future__ import annotations

import dataclasses
import json
import os

import tensorflow as tf

from tfdist.runtime.confine import confine
from tfdist.runtime.rendezvous import free_ports

__all__ = ["Cluster", "cluster_from_environment", "local_cluster", "start_server"]


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of an asynchronous training.

    Attributes:
        servers: "host:port" of each parameter server.
        num_workers: How many workers there are.
        job: "ps" for a server, "worker" for a worker.
        index: This process' place in its job. Worker 0 is the chief.
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
    text = os.environ.get("TF_CONFIG")
    if not text:
        return None
    try:
        config = json.loads(text)
        jobs = config.get("cluster", {})
        if not jobs.get("ps"):
            return None
        job, index = config["task"]["type"], int(config["task"]["index"])
        servers = tuple(str(address) for address in jobs["ps"])
        workers = [
            (name, i) for name in ("chief", "worker") for i in range(len(jobs.get(name, [])))
        ]
        if job == "ps":
            _ = servers[index]
        else:
            job, index = "worker", workers.index((job, index))
        if index < 0 or not workers:
            raise ValueError("no such task")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(
            'TF_CONFIG is not of the form {"cluster": {"ps": ["host:port"], "worker": ["host:port", '
            '...]}, "task": {"type": "worker", "index": 0}}. '
            f"Received: {text!r} ({type(error).__name__}: {error})."
        ) from error
    return Cluster(servers, len(workers), job, index)


def local_cluster(num_servers: int) -> tuple[Cluster, list[tf.distribute.Server]]:
    """A cluster of this process alone: one worker, and servers that run in its threads."""
    cluster = Cluster(
        tuple(f"127.0.0.1:{port}" for port in free_ports(num_servers)), 1, "worker", 0
    )
    return cluster, [start_server(cluster, index) for index in range(num_servers)]


def start_server(cluster: Cluster, index: int) -> tf.distribute.Server:
    """Starts TensorFlow's server of one `ps` task in this process.

    Only those reach it who call at the address that the cluster names, where the system can see to
    it.
    """
    spec = tf.train.ClusterSpec({"ps": list(cluster.servers)})
    server = tf.distribute.Server(spec, job_name="ps", task_index=index)
    host, _, port = cluster.servers[index].rpartition(":")
    confine(int(port), host)
    return server
