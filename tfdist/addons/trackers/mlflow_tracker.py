"""MLflow: https://mlflow.org."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mlflow

from tfdist.addons.trackers.tracker import Tracker
from tfdist.utils import checks


class MLflow(Tracker):
    """Logs to a run of MLflow, in its tracking URI and experiment.

    Set them as for MLflow itself: `MLFLOW_TRACKING_URI` or `mlflow.set_tracking_uri`, `mlflow.set_experiment`.

    Args:
        config: As for `Tracker`; values that are not numbers or texts are logged as JSON.
        every_steps: As for `Tracker`.
        name: The name of a new run.
    """

    name = "mlflow"

    def __init__(
        self,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        every_steps: int | None = None,
    ):
        if name is not None:
            checks.text("name", name)
        super().__init__(config=config, every_steps=every_steps)
        self._run_name = name

    def start(self, config: dict[str, Any], run: str | None) -> tuple[str, int]:
        """Starts a run, or continues one."""
        active = mlflow.start_run(run_id=run, run_name=self._run_name)
        if run is None:
            mlflow.log_params(
                {
                    key: value
                    if isinstance(value, str | int | float)
                    else json.dumps(value, default=str)
                    for key, value in config.items()
                }
            )
        id_ = active.info.run_id
        client = mlflow.MlflowClient()
        names = client.get_run(id_).data.metrics if run else ()
        steps = (each.step for name in names for each in client.get_metric_history(id_, name))
        return id_, max(steps, default=-1)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Logs metrics of a step."""
        mlflow.log_metrics(metrics, step)

    def end(self, failed: bool) -> None:
        """Ends the run."""
        mlflow.end_run("FAILED" if failed else "FINISHED")
