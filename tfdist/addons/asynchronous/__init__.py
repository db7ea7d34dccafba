"""Asynchronous training: parameters on servers, and workers that read and update them on their own.

Two strategies, `ParameterServerStrategy` and `HogwildStrategy`. Below the first, from the bottom: who
takes part (`cluster`), a server as a worker sees it (`connection`), what an optimizer does as a graph
that a server runs (`update_graph`), which server holds which variable (`placement`), who is how many
steps ahead (`membership`), and all servers together (`store`).
"""

from tfdist.addons.asynchronous.detecting import register
from tfdist.addons.asynchronous.errors import ParameterServerError
from tfdist.addons.asynchronous.hogwild import HogwildStrategy
from tfdist.addons.asynchronous.parameter_server import ParameterServerStrategy

__all__ = ["HogwildStrategy", "ParameterServerError", "ParameterServerStrategy"]

register()
