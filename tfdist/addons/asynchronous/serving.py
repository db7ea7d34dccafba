"""The process of a `ps` task, which serves until the workers have ended."""

from __future__ import annotations

import logging
import time

from tfdist.addons.asynchronous.cluster import Cluster, start_server
from tfdist.addons.asynchronous.connection import ServerConnection
from tfdist.addons.asynchronous.membership import Membership, wait

_logger = logging.getLogger("tfdist")
_LOOK_SECONDS = 0.5


def serve(cluster: Cluster, startup_seconds: float, silent_seconds: float) -> None:
    """Runs the server of this process until every worker has left or has stopped its heartbeats.

    Args:
        cluster: The cluster, of which this process is a server.
        startup_seconds: The time that workers have to start.
        silent_seconds: The time without a heartbeat after which a worker counts as ended.

    Raises:
        ParameterServerError: No worker started in time, or the first server has ended.
    """
    server = start_server(cluster, cluster.index)
    _logger.info("tfdist: parameter server %d at %s.", cluster.index, server.target)
    connection = ServerConnection(0, cluster.servers[0], startup_seconds)
    members = Membership(connection, cluster.num_workers, None, silent_seconds, startup_seconds)
    wait(members.exists, startup_seconds, "the first worker to start")
    while not members.all_have_ended():
        time.sleep(_LOOK_SECONDS)
    connection.close()
