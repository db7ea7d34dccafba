"""A rank of `tfdist-bench scaling`: run a script, and time the steps of its `fit`.

    python -m tfdist.launch.bench.scaling_rank SETTINGS train.py [arguments]

SETTINGS is JSON of `Settings`. After the timed steps, further steps run under a `Monitor` for the share of
communication; then the all-reduce is timed, a line of JSON is printed on stdout, and the script is ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import json
import os
import runpy
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.addons.planner import Layout, Link, Machine, describe, estimate
from tfdist.addons.planner.calibration import machine_of
from tfdist.callbacks import Monitor
from tfdist.launch.bench.scaling import BATCH, MARK, Settings
from tfdist.launch.plan.calibrating import link_of
from tfdist.launch.plan.trials import all_reduce_seconds
from tfdist.runtime.horovod_variables import started_by_horovod
from tfdist.runtime.tf_config import read_tf_config
from tfdist.step.context import strategy_of
from tfdist.step.hooks import FitHook
from tfdist.step.keras_step import KerasStep

_SIZES = (4096, 1 << 20, 1 << 22)
_REPEATS = 8
#: Bounds of a fitted rate, in FLOP/s.
_RATES = (1e3, 1e18)


class StepClock(keras.callbacks.Callback, FitHook):
    """Callback that times steps, monitors the same number of steps, and ends the script.

    A step is the time between the beginnings of two batches of an epoch, including batch callbacks and
    input, but not validation. The last batch of an epoch, which may be smaller, does not count, unless it
    is the only one.

    Args:
        settings: The number of steps.
    """

    async_safe = True  # `fit` must run as it does without this callback.

    def __init__(self, settings: Settings):
        super().__init__()
        self._settings = settings
        self._seconds: list[float] = []
        self._seen = self._calls = 0
        self._begin = self._end = 0.0
        self._first = self._steps = 0
        self._monitor: Monitor | None = None
        self._watched = 0

    def around_step(self, step: KerasStep):
        """See `FitHook.around_step`: stamps the steps under the monitor."""
        return (
            contextlib.nullcontext() if self._monitor is None else self._monitor.around_step(step)
        )

    def on_epoch_begin(self, epoch, logs=None):
        """Reset the count of calls."""
        self._calls = 0

    def on_train_batch_begin(self, batch, logs=None):
        """Record the previous step."""
        now = time.perf_counter()
        if self._calls:
            self._take(now - self._begin)
        self._begin, self._first = now, batch

    def on_train_batch_end(self, batch, logs=None):
        """Count the steps of a call, and start monitoring or end the script after enough steps."""
        for value in list((logs or {}).values())[:1]:
            np.asarray(value)  # Waits for a GPU to complete the step.
        self._end = time.perf_counter()
        self._calls += 1
        self._steps = batch - self._first + 1
        self._seen += self._steps
        if self._monitor is not None:
            self._watched += self._steps
            # The first call under the monitor traces the step, and is not part of its results.
            if self._watched >= max(self._settings.steps, 2 * self._steps) + self._steps:
                self._finish(self._monitor)
        elif len(self._seconds) * self._steps >= self._settings.steps:
            self._watch()

    def on_epoch_end(self, epoch, logs=None):
        """Record the only call of an epoch."""
        if self._calls == 1:
            self._take(self._end - self._begin)

    def on_train_end(self, logs=None):
        """Report the results if `fit` ends while it is monitored."""
        if self._monitor is not None:
            self._finish(self._monitor)

    def _take(self, seconds: float) -> None:
        if self._monitor is None and self._seen - self._steps >= self._settings.warm_up:
            self._seconds.append(seconds / self._steps)

    def _watch(self) -> None:
        self._monitor = Monitor(every=1_000_000, show=False, gradient_norm=False)
        self._monitor.set_model(self.model)
        self._monitor.set_params(self.params)
        self._monitor.on_train_begin()
        self._monitor.on_epoch_begin(0)
        if strategy_of(self.model) is not None:
            self.model.make_train_function(force=True)  # Traced with the stamps.

    def _finish(self, monitor: Monitor) -> None:
        self._monitor = None
        monitor.on_train_end()
        report = monitor.reports[-1] if monitor.reports else None
        figures = {} if report is None else report.logs
        sections = {} if report is None else report.sections
        low, seconds, high = statistics.quantiles(self._seconds, n=4)
        per_step = figures.get("samples_per_second", 0.0) * figures.get("step_seconds", 0.0)
        found = {
            "seconds": seconds,
            "quartiles": [low, high],
            "steps": len(self._seconds),
            "rows": round(per_step),
            "communication": sections.get("communication"),
            "hidden": figures.get("communication_hidden"),
            **_predicted(self.model, self._settings, seconds, per_step),
        }
        # A single write, which output of other threads cannot split.
        os.write(1, f"\n{MARK}{json.dumps(found)}\n".encode())
        raise SystemExit(0)


def _predicted(
    model: keras.Model, settings: Settings, seconds: float, rows: float
) -> dict[str, Any]:
    """The planner's prediction for this job, or the reason why there is none, and the measured link."""
    found: dict[str, Any] = {}
    strategy = strategy_of(model)
    ranks = 1 if strategy is None else strategy.mesh.size
    link = Link(1e-5, 1e9)
    if strategy is not None and ranks > 1:
        times = all_reduce_seconds(strategy.engine.group(), _SIZES, _REPEATS)
        link = link_of(_SIZES, [times] * ranks)
        found["link"] = dataclasses.asdict(link)
    try:
        layout = _layout(model, strategy)
        described = describe(model)
        if rows < 1:
            raise ValueError("The rows of a step are not known.")
        if settings.machine is not None:
            machine = machine_of(settings.machine)
        elif settings.flops is None:
            if ranks > 1:
                raise ValueError("A prediction requires the step of one rank, which is not known.")
            machine = _fitted(described, layout, round(rows), seconds)
            found["flops"] = machine.flops[layout.precision.compute]
        else:
            machine = _machine(settings.flops, link, ranks)
        guess = estimate(described, machine, layout, global_batch=round(rows))
        found["predicted"] = guess.step_seconds
    except (TypeError, ValueError) as error:
        found["unpredicted"] = str(error)
    return found


def _layout(model: keras.Model, strategy: Any) -> Layout:
    """The layout of a compiled model.

    Raises:
        ValueError: The planner does not support the layout.
    """
    axes = {} if strategy is None else strategy.mesh.shape
    if axes.get("pipeline", 1) > 1:
        raise ValueError("Pipelined models are not supported by the prediction.")
    policy = model.dtype_policy.name
    optimizer: Any = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    name = type(inner).__name__.lower()
    if name == "sgd" and getattr(inner, "momentum", False):
        name = "momentum"
    sizes: dict[str, Any] = dict(axes)
    return Layout(
        **sizes,
        zero_stage=0 if strategy is None else strategy.zero_stage,
        dtype=policy,
        optimizer=name,
        ema=bool(inner.use_ema),
        accumulation=inner.gradient_accumulation_steps or 1,
    )


def _machine(flops: float, link: Link, ranks: int) -> Machine:
    """A machine of ranks with the given FLOP/s, without a separate cost of memory."""
    return Machine(
        flops=dict.fromkeys(("float32", "bfloat16", "float16"), flops),
        memory=1e15,
        memory_bandwidth=1e15,
        inside=link,
        ranks_per_host=ranks,
        efficiency=1.0,
        memory_efficiency=1.0,
        # On CPUs, ranks compute and send with the same processors.
        overlap=0.8 if tf.config.list_physical_devices("GPU") else 0.0,
    )


def _fitted(model: Any, layout: Layout, rows: int, seconds: float) -> Machine:
    """The machine on which the estimated step of one rank equals the measured one."""
    low, high = _RATES
    link = Link(1e-5, 1e9)
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        found = _machine(middle, link, 1)
        slow = estimate(model, found, layout, global_batch=rows).step_seconds > seconds
        low, high = (middle, high) if slow else (low, middle)
    return _machine(high, link, 1)


def time_fits(clock: StepClock) -> None:
    """Patch `keras.Model.fit` to add a clock to its callbacks."""
    signature = inspect.signature(keras.Model.fit)

    def fit(model, *args, **kwargs):
        bound = signature.bind(model, *args, **kwargs)
        given = bound.arguments.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            given.append(clock)
        else:
            single = isinstance(given, keras.callbacks.Callback)
            bound.arguments["callbacks"] = [*([given] if single else given or []), clock]
        # Looked up on each call, because a strategy may override `fit`.
        return super(keras.Model, model).fit(*bound.args[1:], **bound.kwargs)

    keras.Model.fit = functools.wraps(keras.Model.fit)(fit)


def keep_to_own_cores(count: int) -> None:
    """Pin this rank to separate cores, so that a single rank has no more cores than one of many."""
    config = read_tf_config()
    started = started_by_horovod() or (0 if config is None else config.index, 0)
    cores = sorted(os.sched_getaffinity(0))
    first = started[0] * count
    os.sched_setaffinity(0, {cores[place % len(cores)] for place in range(first, first + count)})


def main(words: Sequence[str]) -> None:
    """Run the script of the command line, as `python` does."""
    settings = Settings(**json.loads(words[0]))
    if settings.cores is not None:
        keep_to_own_cores(settings.cores)
    if settings.batch is not None:
        os.environ[BATCH] = str(settings.batch)
    time_fits(StepClock(settings))
    script = words[1]
    sys.argv[:] = words[1:]
    sys.path[0] = str(Path(script).absolute().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
