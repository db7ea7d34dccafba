"""The callback that watches a training."""

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

#: A trace of more steps would not be looked at, and stands in memory until it is written.
_MOST_TRACED = 1000


class Monitor(keras.callbacks.Callback, FitHook):
    """Says what a training does: how fast, how well used, where the time goes, who holds it up.

    ```python
    model.fit(data, callbacks=[tfdist.callbacks.Monitor(peak="peak.json", trace="trace.json")])
    ```

    Works with any Keras model, alone or under a strategy of tfdist; every rank has the callback. Each
    report has the samples and tokens of a second, the time of a step and its spread, the sections that
    add up to the step, FLOPs and their share of the peak (MFU), communication, memory, the norm of the
    gradients, the loss scale and the time that is left. Logs of epochs get the first few of them.
    docs/monitoring.md says how each is measured.

    Args:
        every: After how many steps a report is due; it comes when the ranks have next told each other
            their figures, every 16 to 24 steps, and less often where steps take less than 5 ms.
        peak: The most floating-point operations that a rank does in a second, for MFU: a number, or the
            file that `tfdist-bench peak --output` wrote, which has the bandwidth too.
        show: Whether the chief shows reports: as a table that is drawn anew in a terminal, else as lines.
        json: A file that reports are added to, each as a line of JSON.
        tensorboard: A directory that gets scalars for TensorBoard.
        prometheus_port: The port of this machine's local address at which the last report is to be had
            in Prometheus' text format; 0 for any that is free. None: no port is opened.
        opentelemetry: Whether gauges of OpenTelemetry are set; its package has to be installed.
        gradient_norm: Whether one step of each block computes the norm of its gradients.
        slow_above: A rank is named when the work of its steps is longer than that of the others by more
            than this share of a step.
        trace: A file for one trace of all ranks, which Perfetto and Chrome's tracing open.
        steps: Which steps are traced, as in `range`: the first, and the one behind the last.

    Raises:
        ValueError: An argument is out of its range.
        ImportError: By `fit`, where `opentelemetry=True` and its package is not installed.
    """

    # It has no methods for batches: what it does between two steps the training function calls.
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
        """The port that was opened."""
        return None if self._session is None else self._session.prometheus_port

    @contextlib.contextmanager
    def around(self, fit: FitContext) -> Iterator[None]:
        """See `FitHook.around`: of a `fit` that fails no callback is told."""
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
        """See `FitHook.around_step`: training steps are stamped."""
        watch = self._watch
        if step.kind != "train" or watch is None or step.model is not watch.model:
            yield
            return
        with watch.stamped(step.arguments[0]) as finish:
            yield
            finish(step.outputs)

    def on_train_begin(self, logs=None):
        """Puts the stamps into the training step, and opens what reports go to."""
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
        """What is validated is no step."""
        if self._watch is not None:
            self._watch.close(time.time())

    def on_epoch_end(self, epoch, logs=None):
        """Adds the figures of the epoch to its logs."""
        if self._session is not None:
            self._session.end_epoch({} if logs is None else logs)

    def on_train_end(self, logs=None):
        """Takes the stamps out, and closes what reports go to."""
        if self._session is not None:
            self._session.end()


def _checked_steps(steps: Any) -> tuple[int, int]:
    found = checks.integers("steps", steps, minimum=0)
    if len(found) != 2 or not found[0] < found[1] <= found[0] + _MOST_TRACED:
        raise checks.refuse(
            "steps",
            steps,
            f"the first step that is traced and the one behind the last, {_MOST_TRACED} steps at most",
        )
    return found[0], found[1]
