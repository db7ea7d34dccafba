"""The rule by which `tfdist.strategies.auto` chooses parameter servers."""

from __future__ import annotations

from absl import logging

from tfdist.addons.asynchronous.cluster import cluster_from_environment
from tfdist.addons.asynchronous.parameter_server import ParameterServerStrategy
from tfdist.extend import register_strategy
from tfdist.mesh import Mesh


def register() -> None:
    """Registers `ParameterServerStrategy` for processes whose TF_CONFIG lists parameter servers."""
    register_strategy(
        "ParameterServerStrategy", lambda: cluster_from_environment() is not None, _make
    )


def _make(mesh: Mesh | None, **options) -> ParameterServerStrategy:
    """The strategy for the servers of TF_CONFIG, which shards only the data."""
    left = {name: value for name, value in options.items() if name != "watchdog_seconds" and value}
    divides = mesh is not None and any(
        size > 1 for axis, size in mesh.shape.items() if axis not in mesh.replica_axes
    )
    if divides or left:
        raise ValueError(
            "ZeRO and mesh axes other than data are not supported with parameter servers. "
            f"Received: mesh={mesh!r}, {left}. Remove them, or start the ranks without "
            "parameter servers."
        )
    seconds = options.get("watchdog_seconds")
    logging.info("tfdist: using ParameterServerStrategy, because TF_CONFIG has parameter servers.")
    return ParameterServerStrategy(**({"watchdog_seconds": seconds} if seconds else {}))
