"""A callback that logs a training to one run of an experiment tracker."""

from __future__ import annotations

import abc
import contextlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from tfdist.extend import FitContext, FitHook, KeptState
from tfdist.utils import checks

_VERSIONS = ("tfdist", "tensorflow", "keras", "horovod")


class Tracker(keras.callbacks.Callback, FitHook, KeptState, abc.ABC):
    """Logs the metrics of each epoch, from the chief, to one run.

    The names are `train/loss` and `validation/loss`; the step is the number of updates. Every rank has the
    callback. With a `Checkpointer`, a restarted job continues the run: its id is in the checkpoint, and steps that
    the run has already are left out. A subclass for another tracker has the three methods `start`, `log` and `end`.

    Args:
        config: What the run should show in addition to the mesh, the optimizer and the versions.
        every_steps: Also logs the metrics of the epoch so far after every so many batches; ranks then add them up
            each time. None for epochs alone.

    Raises:
        TypeError: `config` is not a mapping.
        ValueError: `every_steps` is not positive.
    """

    #: The name of the state in checkpoints: the id of a run means nothing to another tracker.
    name = "tracker"

    def __init__(self, *, config: Mapping[str, Any] | None = None, every_steps: int | None = None):
        super().__init__()
        checks.instance("config", config, Mapping, "a mapping", optional=True)
        self._config = {
            key: value.item() if isinstance(value, np.generic) else value
            for key, value in (config or {}).items()
        }
        self._every = checks.integer("every_steps", every_steps, minimum=1, optional=True)
        self.reads_batch_logs = every_steps is not None
        self._run: str | None = None
        self._fit: FitContext | None = None
        self._is_open = self._is_restored = False
        self._logged: keras.Model | None = None
        #: The last step that a continued run has had; and what was logged of the last step.
        self._last = self._step = -1
        #: The batches of the epoch until the last one that was logged.
        self._batches = 0
        self._names: set[str] = set()

    @abc.abstractmethod
    def start(self, config: dict[str, Any], run: str | None) -> tuple[str, int]:
        """Starts a run, or continues one.

        Args:
            config: What the run should show.
            run: The id of the run to continue; None for a new one.

        Returns:
            The id of the run, and the last step that it has; -1 for none.
        """

    @abc.abstractmethod
    def log(self, metrics: dict[str, float], step: int) -> None:
        """Logs metrics of a step."""

    @abc.abstractmethod
    def end(self, failed: bool) -> None:
        """Ends the run."""

    @property
    def run(self) -> str | None:
        """The id of the run; None before the first epoch, and on other ranks than the chief."""
        return self._run

    # -- hooks --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around(self, fit: FitContext) -> Iterator[None]:
        """From the begin of `fit` to its end."""
        self._fit = fit
        failed = True
        try:
            yield
            failed = False
        finally:
            if self._is_open:
                self._is_open = False
                self.end(failed)

    def kept_states(self, model: keras.Model) -> list[KeptState]:
        """The id of the run."""
        return [self]

    def values(self, *, in_epoch: bool) -> Any:
        """The id of the run."""
        return self._run

    def restore(self, values: Any) -> None:
        """Continues the run of a checkpoint."""
        self._run, self._is_restored = checks.text("values", values), True

    # -- callback -----------------------------------------------------------------------------

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts the run, once a checkpoint was restored."""
        fit, self._batches = self._fit, 0
        is_chief = fit is not None and fit.kind == "fit" and getattr(fit.strategy, "is_chief", True)
        if is_chief and not self._is_open:
            if not self._is_restored and self._logged is not self.model:
                self._run = None  # That of another model, as in cross-validation.
            self._run, last = self.start(self._whole_config(), self._run)
            self._last, self._step = last if self._is_restored else -1, -1
            self._logged, self._is_restored, self._is_open = self.model, False, True

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the epoch so far, if that is wanted."""
        # Calls with several batches report the last one.
        if self._every is not None and (batch + 1) // self._every > self._batches // self._every:
            self._batches = batch + 1
            self._log(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the epoch."""
        self._log({**(logs or {}), "epoch": epoch + 1})

    def _log(self, logs: dict[str, Any] | None) -> None:
        if not self._is_open:
            return
        step = int(self.model.optimizer.iterations)
        if step <= self._last:
            return
        # The end of an epoch may follow that of a batch: then the others are left.
        before = self._names if step == self._step else set()
        found = {_named(name): float(value) for name, value in (logs or {}).items()}
        self.log({name: value for name, value in found.items() if name not in before}, step)
        self._step, self._names = step, set(found)

    def _whole_config(self) -> dict[str, Any]:
        fit: Any = self._fit
        mesh = getattr(fit.strategy, "mesh", None)
        optimizer = self.model.optimizer
        found = {
            "ranks": 1 if mesh is None else mesh.size,
            "mesh": {} if mesh is None else dict(mesh.shape),
            "strategy": type(fit.strategy).__name__,
            "zero_stage": getattr(fit.strategy, "zero_stage", 0),
            "model": self.model.name,
            "optimizer": optimizer.name,
            "learning_rate": float(keras.ops.convert_to_numpy(optimizer.learning_rate)),
            "epochs": fit.arguments.get("epochs"),
            "batch_size": fit.arguments.get("batch_size"),
            "versions": {name: version for name in _VERSIONS if (version := _version(name))},
        }
        return found | self._config


def _named(name: str) -> str:
    if name.startswith("val_"):
        return f"validation/{name.removeprefix('val_')}"
    return name if name == "epoch" else f"train/{name}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
