"""How `tfdist.strategies.auto` comes to parameter servers."""

from __future__ import annotations

from absl import logging

from tfdist.addons.asynchronous.cluster import cluster_from_environment
from tfdist.addons.asynchronous.parameter_server import ParameterServerStrategy
from tfdist.extend import register_strategy
from tfdist.mesh import Mesh


def register() -> None:
    """Registers `ParameterServerStrategy` for processes whose TF_CONFIG names parameter servers."""
    register_strategy(
        "ParameterServerStrategy", lambda: cluster_from_environment() is not None, _make
    )


def _make(mesh: Mesh | None, **options) -> ParameterServerStrategy:
    """The strategy for TF_CONFIG's servers, which divides nothing but the data."""
    left = {name: value for name, value in options.items() if name != "watchdog_seconds" and value}
    divides = mesh is not None and any(
        size > 1 for axis, size in mesh.shape.items() if axis not in mesh.replica_axes
    )
    if divides or left:
        raise ValueError(
            "Workers of parameter servers divide the data alone, without ZeRO and without other "
            f"mesh axes. Received: mesh={mesh!r}, {left}. Leave them out, or start the ranks without "
            "parameter servers."
        )
    seconds = options.get("watchdog_seconds")
    logging.info("tfdist: ParameterServerStrategy, for TF_CONFIG names parameter servers.")
    return ParameterServerStrategy(**({"watchdog_seconds": seconds} if seconds else {}))
