"""TF_CONFIG: the variable by which TensorFlow's launchers tell a process its cluster and its task."""

from __future__ import annotations

import collections
import dataclasses
import json
import os


@dataclasses.dataclass(frozen=True)
class TFConfig:
    """A cluster, and this process' place in it.

    Attributes:
        workers: "host:port" of each worker; a task "chief" counts as the first.
        servers: "host:port" of each parameter server.
        job: "worker" or "ps".
        index: This process' place among those of its job.
        jobs: How many tasks TensorFlow's jobs of workers have, by name, that of the first worker first.
    """

    workers: tuple[str, ...]
    servers: tuple[str, ...]
    job: str
    index: int
    jobs: dict[str, int]


def read_tf_config() -> TFConfig | None:
    """Reads TF_CONFIG; None where it is not set or names no cluster.

    Raises:
        ValueError: It is not the JSON that TensorFlow describes, or names no such task.
    """
    text = os.environ.get("TF_CONFIG")
    if not text:
        return None
    try:
        config = json.loads(text)
        jobs = config.get("cluster", {})
        if not jobs:
            return None
        job, index = config["task"]["type"], int(config["task"]["index"])
        addresses = {
            (name, place): str(address)
            for name in ("chief", "worker", "ps")
            for place, address in enumerate(jobs.get(name, []))
        }
        servers = [task for task in addresses if task[0] == "ps"]
        workers = [task for task in addresses if task[0] != "ps"]
        if not workers:
            raise ValueError("no workers")
        return TFConfig(
            tuple(addresses[task] for task in workers),
            tuple(addresses[task] for task in servers),
            "ps" if job == "ps" else "worker",
            (servers if job == "ps" else workers).index((job, index)),
            dict(collections.Counter(name for name, _ in workers)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            'TF_CONFIG is not of the form {"cluster": {"worker": ["host:port", ...]}, "task": {"type": '
            '"worker", "index": 0}}, with "ps": ["host:port", ...] in the cluster for parameter '
            f"servers. Received: {text!r} ({type(error).__name__}: {error})."
        ) from error


def started_by_tf_config() -> tuple[int, int] | None:
    """Returns (rank, size) where TF_CONFIG names a cluster of workers, else None.

    Raises:
        ValueError: TF_CONFIG is set but is not the JSON that TensorFlow describes, or is that of a
            parameter server.
    """
    config = read_tf_config()
    if config is None:
        return None
    if config.job == "ps":
        raise ValueError(
            "A parameter server is no rank. Received: TF_CONFIG of the task "
            f"ps {config.index}. Start it by `tfdist-run --ps=`."
        )
    return config.index, len(config.workers)
