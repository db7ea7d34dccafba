"""Asynchronous training: parameters on servers, read and updated by workers that do not synchronize.

There are two strategies, `ParameterServerStrategy` and `HogwildStrategy`. The modules of the first, from
the bottom up: the processes of the job (`cluster`), a worker's connection to a server (`connection`), an
optimizer's update as a graph that a server runs (`update_graph`), the placement of variables on servers
(`placement`), the workers and their steps (`membership`), and all servers together (`store`).
"""

from tfdist.addons.asynchronous.detecting import register
from tfdist.addons.asynchronous.errors import ParameterServerError
from tfdist.addons.asynchronous.hogwild import HogwildStrategy
from tfdist.addons.asynchronous.parameter_server import ParameterServerStrategy

__all__ = ["HogwildStrategy", "ParameterServerError", "ParameterServerStrategy"]

register()
