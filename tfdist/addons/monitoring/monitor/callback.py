"""The callback that monitors a training."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.addons.monitoring.monitor.peaks import checked_peak
from tfdist.addons.monitoring.monitor.session import Options, Session
from tfdist.addons.monitoring.monitor.summary import Report
from tfdist.addons.monitoring.monitor.watch import Watch
from tfdist.step.hooks import FitContext, FitHook
from tfdist.step.keras_step import KerasStep
from tfdist.utils import checks
from tfdist.utils.untested import say_untested

#: A trace is kept in memory until it is written, and more steps would hardly be read.
_MOST_TRACED = 1000


class Monitor(keras.callbacks.Callback, FitHook):
    """Reports the speed of a training, its efficiency, its time by section, and slow ranks.

    ```python
    model.fit(data, callbacks=[tfdist.callbacks.Monitor(peak="peak.json", trace="trace.json")])
    ```

    It works with any Keras model, with or without a strategy of tfdist; every rank has the callback. Each
    report has the samples and tokens per second, the time of a step and its spread, the sections that
    add up to the step, FLOPs and their fraction of the peak (MFU), communication, memory, the norm of the
    gradients, the loss scale and the remaining time. Logs of epochs have the most important of them.
    docs/monitoring.md describes how each is measured.

    Args:
        every: The number of steps after which a report is due. It is written when the ranks next
            exchange their figures: every 16 to 24 steps, and less often where steps take less than 5 ms.
        peak: The peak floating-point operations per second of a rank, for MFU: a number, or the file
            that `tfdist-bench peak --output` wrote, which includes the bandwidth.
        show: Whether the chief shows reports: as a table that is updated in a terminal, else as lines.
        json: A file to which reports are appended, each as a line of JSON.
        tensorboard: A directory for scalars for TensorBoard.
        prometheus_port: The port of this machine's local address that serves the last report in
            Prometheus' text format; 0 for any free port. None: no port is opened.
        opentelemetry: Whether to set gauges of OpenTelemetry, which requires its package.
        gradient_norm: Whether one step of each block computes the norm of its gradients.
        slow_above: A rank is reported as slow when the work of its steps is longer than that of the
            others by more than this fraction of a step.
        trace: A file for one trace of all ranks, which Perfetto and Chrome's tracing open.
        steps: The steps that are traced, as in `range`: the first, and the one after the last.

    Raises:
        ValueError: An argument is out of range.
        ImportError: By `fit`, if `opentelemetry=True` and its package is not installed.
    """

    # It has no methods for batches: the training function calls its work between two steps.
    async_safe = True

    def __init__(
        self,
        every: int = 50,
        *,
        peak: float | str | os.PathLike | None = None,
        show: bool = True,
        json: str | os.PathLike | None = None,
        tensorboard: str | os.PathLike | None = None,
        prometheus_port: int | None = None,
        opentelemetry: bool = False,
        gradient_norm: bool = True,
        slow_above: float = 0.25,
        trace: str | os.PathLike | None = None,
        steps: Sequence[int] = (10, 13),
    ):
        super().__init__()
        first, end = _checked_steps(steps)
        self._options = Options(
            every=checks.integer("every", every, minimum=1),
            peak=checked_peak("peak", peak),
            show=checks.boolean("show", show),
            json=checks.path("json", json, optional=True),
            tensorboard=checks.path("tensorboard", tensorboard, optional=True),
            prometheus_port=checks.integer(
                "prometheus_port", prometheus_port, minimum=0, maximum=65_535, optional=True
            ),
            opentelemetry=checks.boolean("opentelemetry", opentelemetry),
            gradient_norm=checks.boolean("gradient_norm", gradient_norm),
            slow_above=checks.number("slow_above", slow_above, above=0, maximum=1000),
            trace=checks.path("trace", trace, optional=True),
            traced=range(first, end) if trace is not None else range(0),
        )
        self._watch: Watch | None = None
        self._session: Session | None = None

    @property
    def reports(self) -> list[Report]:
        """The reports of the last `fit`."""
        return [] if self._session is None else list(self._session.reports)

    @property
    def prometheus_port(self) -> int | None:
        """The port that was opened, or None."""
        return None if self._session is None else self._session.prometheus_port

    @contextlib.contextmanager
    def around(self, fit: FitContext) -> Iterator[None]:
        """See `FitHook.around`: Keras calls no callback for a `fit` that fails."""
        if fit.kind == "fit" and (self._watch is None or self._watch.model is not fit.model):
            self._watch = Watch(fit.model)
        try:
            yield
        except BaseException:
            if fit.kind == "fit" and self._session is not None:
                self._session.close()
            raise

    @contextlib.contextmanager
    def around_step(self, step: KerasStep) -> Iterator[None]:
        """See `FitHook.around_step`: stamps training steps."""
        watch = self._watch
        if step.kind != "train" or watch is None or step.model is not watch.model:
            yield
            return
        with watch.stamped(step.arguments[0]) as finish:
            yield
            finish(step.outputs)

    def on_train_begin(self, logs=None):
        """Puts the stamps into the training step, and opens the outputs of reports."""
        if self._session is not None:
            self._session.close()  # Of a `fit` that failed.
        if tf.config.list_physical_devices("GPU"):
            say_untested("the Monitor (sections of a step and memory on GPUs)")
        if self._watch is None or self._watch.model is not self.model:
            self._watch = Watch(self.model)
        self._session = Session(self._options, self._watch, self.params or {})

    def on_epoch_begin(self, epoch, logs=None):
        """Begins to count the batches of an epoch."""
        if self._session is not None:
            self._session.begin_epoch(epoch)

    def on_test_begin(self, logs=None):
        """Ends the time of the last step: validation is not part of it."""
        if self._watch is not None:
            self._watch.close(time.time())

    def on_epoch_end(self, epoch, logs=None):
        """Adds the figures of the epoch to its logs."""
        if self._session is not None:
            self._session.end_epoch({} if logs is None else logs)

    def on_train_end(self, logs=None):
        """Removes the stamps, and closes the outputs of reports."""
        if self._session is not None:
            self._session.end()


def _checked_steps(steps: Any) -> tuple[int, int]:
    found = checks.integers("steps", steps, minimum=0)
    if len(found) != 2 or not found[0] < found[1] <= found[0] + _MOST_TRACED:
        raise checks.refuse(
            "steps",
            steps,
            f"the first traced step and the one after the last, at most {_MOST_TRACED} steps",
        )
    return found[0], found[1]
