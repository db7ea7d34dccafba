"""Experiment trackers: one run of MLflow, Weights & Biases or Trackio for a job, also after restarts."""

from typing import TYPE_CHECKING

from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.addons.trackers.mlflow_tracker import MLflow as MLflow
    from tfdist.addons.trackers.tracker import Tracker as Tracker
    from tfdist.addons.trackers.trackio_tracker import Trackio as Trackio
    from tfdist.addons.trackers.wandb_tracker import WandB as WandB

# Each imports its library.
_HOMES = {
    "MLflow": "tfdist.addons.trackers.mlflow_tracker",
    "Tracker": "tfdist.addons.trackers.tracker",
    "Trackio": "tfdist.addons.trackers.trackio_tracker",
    "WandB": "tfdist.addons.trackers.wandb_tracker",
}

__all__ = [*_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
