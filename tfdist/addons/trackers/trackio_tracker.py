"""Trackio: https://huggingface.co/docs/trackio."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import trackio

from tfdist.addons.trackers.tracker import Tracker
from tfdist.utils import checks


class Trackio(Tracker):
    """Logs to a run of Trackio, whose id is its name.

    Args:
        project: The project.
        config: As for `Tracker`.
        every_steps: As for `Tracker`.
        arguments: More arguments of `trackio.init`, such as `space_id`.
    """

    name = "trackio"

    def __init__(
        self,
        project: str,
        *,
        config: Mapping[str, Any] | None = None,
        every_steps: int | None = None,
        **arguments: Any,
    ):
        checks.text("project", project)
        super().__init__(config=config, every_steps=every_steps)
        self._project, self._arguments = project, arguments

    def start(self, config: dict[str, Any], run: str | None) -> tuple[str, int]:
        """Starts a run, or continues one."""
        name = run or f"run-{uuid.uuid4().hex[:8]}"
        trackio.init(self._project, name=name, config=config, resume="allow", **self._arguments)
        return name, -1 if run is None else self._last_step(name)

    def _last_step(self, name: str) -> int:
        """The last step of a run on this machine; -1 for one elsewhere, whose steps may repeat."""
        if {"space_id", "server_url"} & self._arguments.keys():
            return -1
        # The public interface has no steps.
        from trackio.sqlite_storage import SQLiteStorage

        found = SQLiteStorage.get_max_step_for_run(self._project, name)
        return -1 if found is None else found

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Logs metrics of a step."""
        trackio.log(metrics, step=step)

    def end(self, failed: bool) -> None:
        """Ends the run."""
        trackio.finish()
