"""Weights & Biases: https://wandb.ai."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import wandb

from tfdist.addons.trackers.tracker import Tracker


class WandB(Tracker):
    """Logs to a run of Weights & Biases.

    Args:
        config: As for `Tracker`.
        every_steps: As for `Tracker`.
        arguments: More arguments of `wandb.init`, such as `project`.
    """

    name = "wandb"

    def __init__(
        self,
        *,
        config: Mapping[str, Any] | None = None,
        every_steps: int | None = None,
        **arguments: Any,
    ):
        super().__init__(config=config, every_steps=every_steps)
        self._arguments = arguments
        self._active: Any = None

    def start(self, config: dict[str, Any], run: str | None) -> tuple[str, int]:
        """Starts a run, or continues one."""
        self._active = wandb.init(
            config=config, **{"id": run, "resume": "allow", **self._arguments}
        )
        return self._active.id, self._active.step - 1

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Logs metrics of a step."""
        self._active.log(metrics, step=step)

    def end(self, failed: bool) -> None:
        """Ends the run."""
        self._active.finish(exit_code=int(failed))
