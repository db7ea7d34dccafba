"""Platforms that start `tfdist-run` on each node of a job."""

from __future__ import annotations

from tfdist.launch.flags import command
from tfdist.runtime.nodes import Nodes, find_nodes


def nodes_of_job() -> Nodes | None:
    """The nodes of the job, if a platform has started this process on one of several.

    Raises:
        UsageError: A variable of the platform is malformed.
    """
    try:
        return find_nodes()
    except ValueError as error:
        raise command.UsageError(str(error)) from None
