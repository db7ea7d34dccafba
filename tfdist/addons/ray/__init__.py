"""Ray Train: workers of Ray as ranks, on any engine and mesh."""

from tfdist.addons.ray.backend import TfdistConfig
from tfdist.addons.ray.report import RayReport, run_directory

__all__ = ["RayReport", "TfdistConfig", "run_directory"]
