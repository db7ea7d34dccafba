"""One monitored `fit`: from stamps to figures, to the exchange among ranks, and to reports."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.addons.monitoring.memory import bytes_in_use, most_bytes
from tfdist.addons.monitoring.monitor.block import MOST_TIMERS, Block
from tfdist.addons.monitoring.monitor.clocks import clock_offsets
from tfdist.addons.monitoring.monitor.flops import Flops
from tfdist.addons.monitoring.monitor.peaks import Peak
from tfdist.addons.monitoring.monitor.sections import SECTIONS, Step, steps_of
from tfdist.addons.monitoring.monitor.sinks import (
    JsonLines,
    OpenTelemetry,
    Prometheus,
    Sink,
    TensorBoard,
    Terminal,
)
from tfdist.addons.monitoring.monitor.slow import SlowRanks
from tfdist.addons.monitoring.monitor.summary import Report, Totals
from tfdist.addons.monitoring.monitor.trace import hidden_share, merged_trace, trace_of, write_trace
from tfdist.addons.monitoring.monitor.watch import Watch
from tfdist.backend.clock.stamps import Timed, listen, timer
from tfdist.backend.keras.attributes import loss_tracker
from tfdist.collectives import all_gather
from tfdist.collectives.objects import all_gather_object
from tfdist.sharding.layout import parameter_bytes
from tfdist.step.context import strategy_of

_logger = logging.getLogger("tfdist")

#: The number of steps of a block, after which ranks exchange their figures. A slow rank is detected
#: within 50 steps, unless steps are short compared with the exchange.
_LEAST_BLOCK, _MOST_BLOCK, _LONGEST_BLOCK = 16, 24, 480
#: For shorter steps the exchange would exceed its fraction of the time in blocks of that length.
_SHORT_SECONDS = 0.005
#: The fraction of the time that the exchange may use.
_GATHER_SHARE = 0.005
_MOST_REPORTS = 1000


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of a `Monitor`, checked."""

    every: int
    peak: Peak | None
    show: bool
    json: str | None
    tensorboard: str | None
    prometheus_port: int | None
    opentelemetry: bool
    gradient_norm: bool
    slow_above: float
    trace: str | None
    traced: range


#: The figures in logs of epochs: a line of output has room for few. Reports have all.
_IN_LOGS = (
    "step_seconds",
    "samples_per_second",
    "tokens_per_second",
    "mfu",
    "gradient_norm",
    "imbalance",
)


class Session:
    """The monitoring of one `fit`.

    Args:
        options: The options of the monitor.
        watch: The model's watch; the session installs it.
        params: The parameters that Keras passes to callbacks.

    Attributes:
        reports: The last reports.
        prometheus_port: The port that was opened, or None.
    """

    def __init__(self, options: Options, watch: Watch, params: Mapping[str, Any]):
        self._options, self._watch, self._params = options, watch, params
        strategy = strategy_of(watch.model)
        mesh = None if strategy is None else strategy.mesh
        self._engine = None if strategy is None or strategy.mesh.size == 1 else strategy.engine
        self._group = None if self._engine is None else self._engine.group()
        self._size, self._rank = (1, 0) if mesh is None else (mesh.size, mesh.rank)
        self._offsets, self._hosts = [0.0], [socket.gethostname()]
        if self._engine is not None:
            self._offsets = clock_offsets(self._engine)
            self._hosts = all_gather_object(
                self._hosts[0], self._engine.group(), name="monitor/hosts"
            )
        peak = options.peak
        flops, bandwidth = (None, None) if peak is None else (peak.flops, peak.bytes_per_second)
        self._totals = Totals(mesh, flops, bandwidth)
        self._epoch_totals = Totals(mesh, flops, bandwidth)
        self._slow = SlowRanks(options.slow_above)
        self._timers: list[Timed] = []
        #: The names of timers in the training thread, the same on all ranks, and those not yet shared.
        self._sections: list[str] = []
        self._unknown: set[str] = set()
        self._traced = options.traced
        self._traced_steps: list[Step] = []
        self._traced_timers: list[Timed] = []
        self._done = self._epoch = self._epoch_begin = self._norms = 0
        self._block, self._cost = _LEAST_BLOCK, 0.0
        self._loss = self._loss_now = (0.0, 0.0)
        self._parameters = float(parameter_bytes(watch.model))
        self.reports: list[Report] = []
        self.prometheus_port: int | None = None
        self._open = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:  # Closes the open outputs if the rest fails.
            self._sinks = self._opened_sinks(stack) if self._rank == 0 else []
            stack.enter_context(listen(self._timers.append))
            watch.install(self._between)
            stack.callback(watch.remove)
            self._ask_norm(2)  # The times of the first step, which is traced, do not count.
            self._open = stack.pop_all()

    def _opened_sinks(self, stack: contextlib.ExitStack) -> list[Sink]:
        options, sinks = self._options, []

        def add(sink: Sink) -> None:
            sinks.append(sink)
            stack.callback(sink.close)

        if options.opentelemetry:
            add(OpenTelemetry())
        if options.json is not None:
            begin = {"ranks": self._size, "hosts": self._hosts, "time": time.time()}
            add(JsonLines(options.json, begin))
        if options.tensorboard is not None:
            add(TensorBoard(options.tensorboard))
        if options.prometheus_port is not None:
            prometheus = Prometheus(options.prometheus_port)
            self.prometheus_port = prometheus.port
            add(prometheus)
        if options.show:
            add(Terminal())
        return sinks

    def close(self) -> None:
        """Removes the stamps, and closes the outputs of reports."""
        self._open.close()

    def begin_epoch(self, epoch: int) -> None:
        """Begins to count the batches of an epoch."""
        self._epoch, self._epoch_begin = epoch, self._done
        self._loss = self._loss_now = (0.0, 0.0)
        self._epoch_totals.clear()

    def end_epoch(self, logs: dict[str, Any]) -> None:
        """Adds the figures of the epoch to its logs."""
        self._watch.close(time.time())
        self._exchange()
        if not self._epoch_totals.steps:
            return
        figures = self._epoch_totals.logs()
        given = {name: float(value) for name, value in logs.items() if np.ndim(value) == 0}
        self._report("epoch", self._epoch_totals, figures | given)
        logs |= {name: figures[name] for name in _IN_LOGS if name in figures and name not in logs}

    def end(self) -> None:
        """Writes the last report and closes the session, at the end of `fit`."""
        self._watch.close(time.time())
        self._exchange()
        if self._totals.steps:  # Fewer steps than `every`.
            self._report("interval", self._totals, self._totals.logs())
        if self._traced:
            self._write_trace()
        self.close()

    # -- between two steps ------------------------------------------------------------------------

    def _between(self) -> None:
        """Called by the training thread before each call of the training function."""
        if self._norms:
            self._norms -= 1
            if not self._norms:
                self._watch.ask_norm(False)
        over = self._watch.num_closed * self._watch.model.steps_per_execution
        trace_over = bool(self._traced) and self._done + over >= self._traced.stop
        if over >= self._block or trace_over:
            with timer("monitor"):
                self._exchange()
                if trace_over:
                    self._write_trace()

    def _exchange(self) -> None:
        """Reads the stamps, and exchanges the figures; all ranks call this at the same step."""
        begun = time.perf_counter()
        steps = self._read()
        blocks = self._gathered(self._described(steps))
        if any(each["unknown_names"] for each in blocks):
            self._learn_names()
            blocks = self._gathered(self._described(steps))
        self._loss = self._loss_now
        if all(each["steps"] for each in blocks):
            self._totals.add(blocks)
            self._epoch_totals.add(blocks)
        names = self._sections
        for slow in self._slow.look(blocks, names):
            if self._rank == 0:
                seen = self._slow.scores[slow.rank]["came_last"]
                words = f"; it was the last to have its gradients in {seen:.0%} of the steps"
                _logger.warning("%s", slow.words(self._hosts[slow.rank], words if seen else ""))
        self._choose_block(blocks)
        if self._totals.steps >= self._options.every:
            self._report("interval", self._totals, self._totals.logs())
            self._totals.clear()
        self._ask_norm(1)
        self._cost = time.perf_counter() - begun

    def _ask_norm(self, calls: int) -> None:
        """Makes the next `calls` calls compute the norm of their gradients."""
        if self._options.gradient_norm:
            self._norms = calls + 1
            self._watch.ask_norm(True)

    def _read(self) -> list[Step]:
        """The steps since the last call in which no graph was traced."""
        found = []
        timers, self._timers[:] = list(self._timers), []
        for execution in self._watch.take():
            close = execution.close or execution.end
            inside = [t for t in timers if t.end > execution.begin and t.begin < close]
            main = [each for each in inside if each.on_main_thread]
            steps = steps_of(execution, main)
            for step in steps:
                if self._done in self._traced:
                    self._traced_steps.append(step)
                self._done += 1
            if steps and self._done - len(steps) in self._traced:
                self._traced_timers += [each for each in inside if not each.on_main_thread]
            if not execution.traced:
                found += steps
        known = {*SECTIONS, *self._sections}
        if len(self._sections) < MOST_TIMERS:
            self._unknown |= {n for step in found for n in step.seconds if n not in known}
        # Timers that have not ended are read again with the next steps.
        last = self._watch.executions[-1].begin if self._watch.executions else math.inf
        self._timers += [each for each in timers if each.end > last]
        return found

    def _described(self, steps: Sequence[Step]) -> Block:
        """The figures that this rank sends to the others."""
        block = Block()
        places = {name: place for place, name in enumerate(self._sections)}
        block.take(steps, places, self._offsets[self._rank])
        flops = [self._flops_of(step) for step in steps]
        block["model_flops"] = sum(each.model for each in flops)
        block["again_flops"] = sum(each.again for each in flops)
        block["memory"], block["peak_memory"] = float(bytes_in_use()), most_bytes()
        block["parameters"], block["cost"] = self._parameters, self._cost
        block["unknown_names"] = float(len(self._unknown))
        norms = [_last_norm(step) for step in steps]
        known = [each for each in norms if each is not None]
        if known:
            block["norm"] = known[-1]
        scale = getattr(self._watch.model.optimizer, "dynamic_scale", None)
        if scale is not None:
            block["loss_scale"] = float(keras.ops.convert_to_numpy(scale))
        tracker = loss_tracker(self._watch.model, None)
        if tracker is not None and tracker.variables:
            total, count = (float(keras.ops.convert_to_numpy(v)) for v in tracker.variables[:2])
            before = self._loss if count >= self._loss[1] else (0.0, 0.0)
            block["loss"], block["losses"] = total - before[0], count - before[1]
            self._loss_now = (total, count)
        return block

    def _flops_of(self, step: Step) -> Flops:
        return Flops() if step.row is None else self._watch.flops_of(step.row)

    def _gathered(self, block: Block) -> list[Block]:
        if self._group is None:
            return [block]
        mine = tf.constant(block.vector[None])
        every = all_gather(mine, self._group, name="monitor/block").numpy()
        return [Block(vector) for vector in every]

    def _learn_names(self) -> None:
        """Assigns the same numbers to sections of timers on all ranks."""
        unknown = [sorted(self._unknown)]
        if self._group is not None:
            unknown = all_gather_object(unknown[0], self._group, name="monitor/timer names")
        for name in sorted({name for each in unknown for name in each}):
            if name not in self._sections and len(self._sections) < MOST_TIMERS:
                self._sections.append(name)
        if len(self._sections) == MOST_TIMERS and not self._unknown <= set(self._sections):
            _logger.warning(
                "Monitor supports %d sections of timers; others count as `callbacks`.",
                MOST_TIMERS,
            )
        self._unknown = set()

    def _choose_block(self, blocks: Sequence[Block]) -> None:
        """Sets the number of steps until the next exchange, by the chief's clock."""
        chief = blocks[0]
        if not chief["steps"]:
            return
        step = chief["seconds"] / chief["steps"]
        most = _MOST_BLOCK if step > 0.005 else _LONGEST_BLOCK
        wanted = math.ceil(chief["cost"] / (_GATHER_SHARE * step)) if step > 0 else most
        self._block = min(max(wanted, _LEAST_BLOCK), most)

    # -- reports ----------------------------------------------------------------------------------

    def _report(self, kind: str, totals: Totals, figures: dict[str, float]) -> Report:
        logs = dict(figures)
        left = self._steps_left()
        if left is not None and "step_seconds" in logs:
            logs["eta_seconds"] = left * logs["step_seconds"]
        report = Report(
            kind,
            self._done,
            self._epoch,
            self._done - self._epoch_begin,
            logs,
            totals.sections(self._sections),
            totals.ranks(self._sections, self._slow.scores),
        )
        self.reports = [*self.reports[1 - _MOST_REPORTS :], report]
        for sink in self._sinks:
            sink.take(report)
        return report

    def _steps_left(self) -> int | None:
        epochs, steps = self._params.get("epochs"), self._params.get("steps")
        if steps is None and self._epoch > 0 and self._epoch_begin:
            steps = self._epoch_begin // self._epoch
        if epochs is None or steps is None:
            return None
        here = self._done - self._epoch_begin
        return max((epochs - self._epoch) * steps - here, 0)

    def _write_trace(self) -> None:
        """Merges the ranks' traces; all ranks call this at the same step."""
        first = self._traced.start
        if self._engine is not None:
            self._offsets = clock_offsets(self._engine)
        trace = trace_of(
            self._traced_steps,
            self._traced_timers,
            first,
            self._offsets[self._rank],
            self._hosts[self._rank],
        )
        own = (trace, hidden_share(self._traced_steps))
        every = [own]
        if self._group is not None:
            every = all_gather_object(own, self._group, name="monitor/trace")
        if self._rank == 0 and self._options.trace is not None:
            merged = merged_trace(
                [trace for trace, _ in every],
                hidden=[hidden for _, hidden in every],
                hosts=self._hosts,
                offsets=self._offsets,
                steps=[first, first + len(self._traced_steps)],
            )
            write_trace(self._options.trace, merged)
            _logger.info(
                "Steps %d to %d are in %s.",
                first,
                first + len(self._traced_steps) - 1,
                self._options.trace,
            )
        self._traced, self._traced_steps, self._traced_timers = range(0), [], []


def _last_norm(step: Step) -> float | None:
    """This rank's part of the squared norm, where the step computed it."""
    if step.row is None:
        return None
    known = [each for each in step.row.all_of("norm") if not each < 0]  # NaN is a norm.
    return sum(known) if known else None
