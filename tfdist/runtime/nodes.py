"""Platforms that start one process on each node and name the first node: Kubeflow Trainer, SageMaker, Vertex AI.

`tfdist-run` starts the ranks of a node there. Without it, the process of a node is a rank.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping

#: That of SageMaker's own launchers.
_SAGEMAKER_PORT = 7777


@dataclasses.dataclass(frozen=True)
class Nodes:
    """What a platform says of the nodes of a job.

    Attributes:
        platform: Its name, for messages.
        node: The number of this node.
        count: The number of nodes.
        host: The host of the first node.
        port: A port of that host for the rendezvous.
        ranks: The number of ranks of a node; None if the platform leaves it to the launcher.
    """

    platform: str
    node: int
    count: int
    host: str
    port: int
    ranks: int | None = None


def find_nodes(environment: Mapping[str, str] = os.environ) -> Nodes | None:
    """The nodes of this job, which may be one; None on another platform.

    Raises:
        ValueError: A variable is malformed.
    """
    for marks, read in _PLATFORMS.items():
        if all(mark in environment for mark in marks):
            try:
                return read(environment)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                given = ", ".join(f"{mark}={environment[mark][:200]}" for mark in marks)
                raise ValueError(
                    f"The variables of the nodes of a job must be valid. Received: {given} "
                    f"({type(error).__name__}: {error}). Unset them, or start the ranks with `tfdist-run -H`."
                ) from error
    return None


def _kubeflow(environment: Mapping[str, str]) -> Nodes:
    """Of Kubeflow Trainer's runtimes for PyTorch, which set what torchrun reads."""
    nodes, ranks = int(environment["PET_NNODES"]), environment.get("PET_NPROC_PER_NODE", "")
    return Nodes(
        "Kubeflow Trainer",
        range(nodes).index(int(environment["PET_NODE_RANK"])),
        nodes,
        environment["PET_MASTER_ADDR"],
        int(environment["PET_MASTER_PORT"]),
        int(ranks) if ranks.isdigit() else None,  # Otherwise auto, cpu or gpu.
    )


def _sagemaker(environment: Mapping[str, str]) -> Nodes:
    hosts = sorted(json.loads(environment["SM_HOSTS"]))
    node = hosts.index(environment["SM_CURRENT_HOST"])
    return Nodes("SageMaker", node, len(hosts), hosts[0], _SAGEMAKER_PORT)


def _vertex(environment: Mapping[str, str]) -> Nodes:
    """Of Vertex AI: the first pool has the first node, and the second the others."""
    spec = json.loads(environment["CLUSTER_SPEC"])
    pools, task = spec["cluster"], spec["task"]
    names = [f"workerpool{number}" for number in range(2)]
    tasks = [(name, place) for name in names for place in range(len(pools.get(name, [])))]
    host, _, port = pools[names[0]][0].rpartition(":")
    node = tasks.index((task["type"], int(task["index"])))
    return Nodes("Vertex AI", node, len(tasks), host, int(port))


_PLATFORMS = {
    ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"): _kubeflow,
    ("SM_HOSTS", "SM_CURRENT_HOST"): _sagemaker,
    ("CLUSTER_SPEC",): _vertex,
}
