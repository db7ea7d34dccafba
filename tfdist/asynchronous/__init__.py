"""Asynchronous training: parameters on servers, and workers that read and update them on their own.

`strategies/` builds `ParameterServerStrategy` on it. From the bottom: who takes part (`cluster`), a
server as a worker sees it (`connection`), what an optimizer does as a graph that a server runs
(`update_graph`), which server holds which variable (`placement`), who is how many steps ahead
(`membership`), and all servers together (`store`).
"""

from tfdist.asynchronous.cluster import Cluster, cluster_from_environment, start_server
from tfdist.asynchronous.errors import ParameterServerError
from tfdist.asynchronous.store import ParameterStore

__all__ = [
    "Cluster",
    "ParameterServerError",
    "ParameterStore",
    "cluster_from_environment",
    "start_server",
]
