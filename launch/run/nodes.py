"""Platforms that start `tfdist-run` on each node of a job."""

from __future__ import annotations

import os

from tfdist.launch.flags import command
from tfdist.runtime.nodes import Nodes, find_nodes


def nodes_of_job() -> Nodes | None:
    """The nodes of the job, if a platform has started this process on one of them.

    Raises:
        UsageError: A variable of the platform is malformed.
    """
    try:
        return find_nodes()
    except ValueError as error:
        raise command.UsageError(str(error)) from None


def environments_on(nodes: Nodes, ranks: int) -> list[dict[str, str]]:
    """The variables of each rank of this node, as torchrun sets them.

    Args:
        nodes: What the platform says.
        ranks: The ranks of each node.
    """
    common = {
        "WORLD_SIZE": str(ranks * nodes.count),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": nodes.host,
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(nodes.port),
        "TF_CONFIG": "",  # Of the node, on Vertex AI.
    }
    first = nodes.node * ranks
    return [
        {"RANK": str(first + place), "LOCAL_RANK": str(place), **common} for place in range(ranks)
    ]
