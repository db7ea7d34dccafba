"""What a process of a `ps` task does: serves until the workers have ended."""

from __future__ import annotations

import logging
import time

from tfdist.addons.asynchronous.cluster import Cluster, start_server
from tfdist.addons.asynchronous.connection import ServerConnection
from tfdist.addons.asynchronous.membership import Membership, wait

_logger = logging.getLogger("tfdist")
_LOOK_SECONDS = 0.5


def serve(cluster: Cluster, startup_seconds: float, silent_seconds: float) -> None:
    """Runs the server of this process until every worker has left or is not heard any more.

    Args:
        cluster: The cluster, of which this process is a server.
        startup_seconds: How long workers may take to start.
        silent_seconds: After how long without a sign a worker counts as ended.

    Raises:
        ParameterServerError: No worker starts in time, or the first server has ended.
    """
    server = start_server(cluster, cluster.index)
    _logger.info("tfdist: parameter server %d at %s.", cluster.index, server.target)
    connection = ServerConnection(0, cluster.servers[0], startup_seconds)
    members = Membership(connection, cluster.num_workers, None, silent_seconds, startup_seconds)
    wait(members.exists, startup_seconds, "No worker has started")
    while not members.all_have_ended():
        time.sleep(_LOOK_SECONDS)
    connection.close()
