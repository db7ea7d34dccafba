"""Shares of rows by the measured speed of the ranks: when they change, and to which values."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import statistics
import time
from collections.abc import Iterator, Sequence

import keras
import numpy as np
import psutil
import tensorflow as tf

from tfdist.addons.unequal_ranks.free_memory import available_bytes
from tfdist.addons.unequal_ranks.measured_rows import MeasuredRowShares
from tfdist.addons.unequal_ranks.proportions import balanced_rows
from tfdist.addons.unequal_ranks.work import BusyTime, WorkMeter
from tfdist.collectives import all_gather
from tfdist.collectives.objects import all_gather_object
from tfdist.step.context import DistributedStrategy
from tfdist.step.hooks import FitContext, FitHook
from tfdist.step.keras_step import KerasStep
from tfdist.step.shares import MeasuredShares, parts_of

_logger = logging.getLogger("tfdist")

#: The minimum and maximum number of calls of the training function between two checks.
_LEAST_CALLS, _MOST_CALLS = 8, 64
#: The fraction of the time that checks may use, unless the minimum requires more.
_LOOK_SHARE = 0.002
#: The minimum number of steps for a measured speed.
_LEAST_STEPS = 3
#: The fraction of the free memory of a host that ranks may fill.
_MEMORY_SHARE = 0.8
_MOST_SHOWN = 8


def share_by_speed(strategy: DistributedStrategy, given: str | MeasuredShares) -> None:
    """Gives the ranks of a strategy shares of the rows that follow their measured speeds.

    Args:
        strategy: The strategy.
        given: "measured" for the default rules, or the rules.
    """
    measured = MeasuredShares() if isinstance(given, str) else given
    strategy.row_shares = shares = MeasuredRowShares(measured, strategy.row_group.size)
    strategy.keep(shares)
    if strategy.engine.size > 1:
        strategy.fit_hooks.append(Balancing(strategy))


class Balancing(keras.callbacks.Callback, FitHook):
    """Changes the shares of a strategy between the steps of `fit`; every rank has it.

    Args:
        strategy: A strategy with measured shares.
    """

    async_safe = True

    def __init__(self, strategy):
        super().__init__()
        self._strategy = strategy
        self._shares: MeasuredRowShares = strategy.row_shares
        self._meter = WorkMeter(strategy.mesh)
        self._ranks_of_host = 1
        self._left = self._calls = 0
        self._began, self._cost = 0.0, 0.0

    @contextlib.contextmanager
    def around(self, fit: FitContext) -> Iterator[None]:
        """See `FitHook.around`: adds itself to the callbacks of each `fit`."""
        if fit.kind == "fit":
            fit.arguments["callbacks"] = [self, *fit.callbacks]
        yield

    def around_step(self, step: KerasStep) -> contextlib.AbstractContextManager:
        """See `FitHook.around_step`: measures training steps."""
        if step.kind != "train":
            return contextlib.nullcontext()
        return self._meter.measuring(step.rows, step.arguments)

    def on_train_begin(self, logs=None):
        """Counts the ranks that share the memory of this host."""
        hosts = all_gather_object(
            socket.gethostname(), self._strategy.group(), name="balance/hosts"
        )
        self._ranks_of_host = hosts.count(socket.gethostname())
        self._begin(_LEAST_CALLS)

    def on_epoch_begin(self, epoch, logs=None):
        """Discards the time between two epochs, which is not part of a step."""
        self._meter.restart()

    def on_train_batch_begin(self, batch, logs=None):
        """Checks at intervals whether other shares are better."""
        if self._left == 0:
            self._look()
        self._left -= 1

    def _begin(self, calls: int) -> None:
        self._meter.restart()
        self._left = self._calls = calls
        self._began = time.monotonic()

    def _look(self) -> None:
        begun = time.monotonic()
        call_seconds = (begun - self._began) / self._calls
        mine = self._told(self._meter.take(), call_seconds)
        every = all_gather(mine[None], self._strategy.group(), name="balance/work").numpy()
        self._decide(every)
        # The chief's clock determines for all ranks when the next check is due.
        seconds, cost = every[0, 4], every[0, 5]
        due = math.ceil(cost / (_LOOK_SHARE * seconds)) if seconds > 0 else _MOST_CALLS
        self._begin(min(max(due, _LEAST_CALLS), _MOST_CALLS))
        self._cost = time.monotonic() - begun

    def _told(self, worked: Sequence[BusyTime], call_seconds: float) -> tf.Tensor:
        """The figures that this rank sends: place, rows, seconds, most rows, and two times."""
        known = [each for each in worked if each.rows > 0 and each.seconds > 0]
        rows = seconds = most = 0.0
        if len(known) >= _LEAST_STEPS:
            rows = max(each.rows for each in known)
            seconds = rows * statistics.median(each.seconds / each.rows for each in known)
            most = rows * self._room()
        place = self._strategy.row_group.rank
        return tf.constant([place, rows, seconds, most, call_seconds, self._cost], tf.float64)

    def _room(self) -> float:
        """The ratio of the rows that fit in this rank's memory to its current rows.

        It assumes that all memory of the process grows with the rows, so it is rather too small.
        """
        measured = self._shares.measured
        if measured.max_rows is not None or tf.config.list_logical_devices("GPU"):
            return math.inf
        free = _MEMORY_SHARE * available_bytes()[0] / self._ranks_of_host
        return 1 + free / max(psutil.Process().memory_info().rss, 1)

    def _decide(self, every: np.ndarray) -> None:
        """Sets new shares if they are faster; all ranks come to the same result."""
        measured = self._shares.measured
        size = self._strategy.row_group.size
        rows, seconds = np.zeros(size), np.zeros(size)
        most = np.array(self._shares.most_rows)
        for place, own_rows, own_seconds, own_most, *_ in every:
            if not own_rows:
                return
            # Ranks that compute the same rows have the speed of the slowest of them.
            rows[int(place)] = max(rows[int(place)], own_rows)
            seconds[int(place)] = max(seconds[int(place)], own_seconds)
            most[int(place)] = min(most[int(place)], own_most)
        speeds = rows / seconds
        if self._shares.speeds is not None:
            old = np.log(self._shares.speeds)
            speeds = np.exp(old + measured.smoothing * (np.log(speeds) - old))
        self._shares.speeds = tuple(speeds.tolist())
        wanted = np.array(
            balanced_rows(float(rows.sum()), speeds.tolist(), most.tolist()), np.float64
        )
        now, then = (rows / speeds).max(), (wanted / speeds).max()
        over = (rows > most).any()
        if now > (1 + measured.hysteresis) * then or over:
            self._shares.set_parts(parts_of(wanted.tolist()))
            if self._strategy.is_chief:
                _logger.info("Ranks now get %s of the rows, at %s rows/s.", *self._words(speeds))

    def _words(self, speeds: np.ndarray) -> tuple[str, str]:
        shares = [f"{share:.1%}" for share in self._shares.shares]
        found = [f"{speed:,.0f}" for speed in speeds]
        more = ", ..." if len(shares) > _MOST_SHOWN else ""
        return ", ".join(shares[:_MOST_SHOWN]) + more, ", ".join(found[:_MOST_SHOWN]) + more
