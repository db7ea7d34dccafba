"""TF_CONFIG: the variable by which TensorFlow's launchers describe the cluster and the task."""

from __future__ import annotations

import collections
import dataclasses
import json
import os


@dataclasses.dataclass(frozen=True)
class TFConfig:
    """A cluster, and the place of this process in it.

    Attributes:
        workers: "host:port" of each worker; a task "chief" counts as the first.
        servers: "host:port" of each parameter server.
        job: "worker" or "ps".
        index: The index of this process among those of its job.
        jobs: The number of tasks in each of TensorFlow's jobs of workers, that of the first worker
            first.
    """

    workers: tuple[str, ...]
    servers: tuple[str, ...]
    job: str
    index: int
    jobs: dict[str, int]


def read_tf_config() -> TFConfig | None:
    """Reads TF_CONFIG; None if it is not set or names no cluster.

    Raises:
        ValueError: TF_CONFIG is malformed, or its task is not in its cluster.
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
        workers, servers = (
            {
                (name, place): str(each)
                for name in names
                for place, each in enumerate(jobs.get(name, []))
            }
            for names in (("chief", "worker"), ("ps",))
        )
        if not workers:
            raise ValueError("workers not found")
        tasks = list(servers if job == "ps" else workers)
        return TFConfig(
            tuple(workers.values()),
            tuple(servers.values()),
            "ps" if job == "ps" else "worker",
            tasks.index((job, index)),
            dict(collections.Counter(name for name, _ in workers)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            'TF_CONFIG is not of the form {"cluster": {"worker": ["host:port", ...]}, "task": {"type": '
            '"worker", "index": 0}}, with "ps": ["host:port", ...] in the cluster for parameter '
            f"servers. Received: {text!r} ({type(error).__name__}: {error})."
        ) from error


def started_by_tf_config() -> tuple[int, int] | None:
    """Returns (rank, size) if TF_CONFIG names a cluster of workers, else None.

    Raises:
        ValueError: TF_CONFIG is malformed, or is that of a parameter server.
    """
    config = read_tf_config()
    if config is not None and config.job == "ps":
        raise ValueError(
            "A parameter server is not a rank. Received: TF_CONFIG of the task "
            f"ps {config.index}. Start it with `tfdist-run --ps=`."
        )
    return None if config is None else (config.index, len(config.workers))
