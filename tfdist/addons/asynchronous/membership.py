"""The participating workers and how many steps each is ahead: a table on the first server.

Stale synchronous parallel (Ho et al. 2013, "More effective distributed ML via a stale synchronous
parallel parameter server"): a worker begins a step only when it is at most s steps ahead of the
slowest. A worker without a heartbeat for a while is left out, so that no worker waits for a dead one.
When its heartbeats resume it takes part again, at the step of the slowest.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdist.addons.asynchronous.connection import ServerConnection
from tfdist.addons.asynchronous.errors import ParameterServerError

_logger = logging.getLogger("tfdist")

#: The columns of the table.
_STARTED, _FINISHED, _CLOCK, _BEAT, _STATE = range(5)
_COLUMNS = 5
_UNSEEN, _PRESENT, _LEFT_OUT, _GONE = range(4)
_BEAT_SECONDS = 0.5
_LONGEST_LOOK_SECONDS = 0.02
_NEVER = np.iinfo(np.int64).max


class Membership:
    """One worker's view of the table.

    Args:
        connection: The connection to the first server.
        num_workers: The number of rows of the table.
        index: This worker's row; None to only observe.
        silent_seconds: The time without a heartbeat after which a worker is left out.
        startup_seconds: The time that other workers have to start.
    """

    def __init__(
        self,
        connection: ServerConnection,
        num_workers: int,
        index: int | None,
        silent_seconds: float,
        startup_seconds: float,
    ):
        self._connection, self._index = connection, index
        self._silent, self._startup = silent_seconds, startup_seconds
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._beats = 0
        self._heard: dict[int, tuple[int, float]] = {}
        self._stop = threading.Event()
        self._seen = np.zeros([num_workers, _COLUMNS], np.int64)
        self.fit = 0
        self.clock = 0
        with connection.building():
            handle = connection.variable("members", tf.int64, [num_workers, _COLUMNS])
            self._places = tf.compat.v1.placeholder(tf.int64, [None, 2])
            self._values = tf.compat.v1.placeholder(tf.int64, [None])
            write = tf.raw_ops.ResourceScatterNdUpdate(
                ref=handle, indices=self._places, updates=self._values
            )
            with tf.control_dependencies([write]):
                self._table = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64)
            exists = tf.raw_ops.VarIsInitializedOp(resource=handle)
            create = tf.raw_ops.AssignVariableOp(
                resource=handle, value=tf.zeros([num_workers, _COLUMNS], tf.int64)
            )
        self._run = connection.function([self._table], self.feeds)
        self._exists = connection.function([exists], [])
        self._create = connection.function([create], [])
        self._thread = threading.Thread(target=self._beat, daemon=True, name="tfdist-beats")

    # -- the table --------------------------------------------------------------------------

    @property
    def feeds(self) -> list[tf.Tensor]:
        """The placeholders that a call which writes to the table feeds."""
        return [self._places, self._values]

    @property
    def table_after(self) -> tf.Tensor:
        """The table after the fed values are written."""
        return self._table

    def cells(self, **columns: int) -> tuple[np.ndarray, np.ndarray]:
        """The feeds that set cells of this worker's row, by lower-case names of columns."""
        numbers = [_NAMES[name] for name in columns]
        places = [(self._index, number) for number in numbers]
        return (
            np.array(places, np.int64).reshape(-1, 2),
            np.array(list(columns.values()), np.int64),
        )

    def read(self) -> np.ndarray:
        """The table, read by a write of no cells."""
        return self._run(*self.cells())[0]

    def write(self, **columns: int) -> np.ndarray:
        """Sets cells of this worker's row, and returns the table."""
        return self._run(*self.cells(**columns))[0]

    def exists(self) -> bool:
        """Whether worker 0 has created the table."""
        return bool(self._exists()[0])

    # -- coming and going -------------------------------------------------------------------

    def join(self) -> None:
        """Joins the training; worker 0 creates the table if it does not exist.

        Raises:
            ParameterServerError: The table was not created in time.
        """
        if self._index == 0 and not self.exists():
            self._create()
        wait(self.exists, self._startup, "worker 0 to start")
        row = self.read()[self._index]
        if row[_STATE] != _UNSEEN:
            # This process replaces one that died: its next `fit` is the one that was in progress.
            self.fit = int(min(row[_FINISHED], max(row[_STARTED] - 1, 0)))
            _logger.warning("tfdist: worker %d takes part again.", self._index)
        self.write(state=_PRESENT)
        self._thread.start()

    def leave(self) -> None:
        """Records that this worker has left permanently."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
            # A server that has ended needs no record.
            with contextlib.suppress(ParameterServerError):
                self.write(state=_GONE)

    def start_fit(self) -> None:
        """Begins the next `fit`."""
        with self._lock:
            self.fit += 1
            table = self.read()
            self.clock = self._slowest(table, others_only=True, empty=0)
            if not (table[:, _STARTED] >= self.fit).any():
                self.clock = 0
            self._seen = self.write(started=self.fit, clock=self.clock)

    def finish_fit(self, seconds: float) -> None:
        """Records that this worker's `fit` has ended, and waits for the other live workers."""
        self.write(finished=self.fit)
        wait(lambda: self._slowest(self.read()) == _NEVER, seconds, "the other workers to finish")

    # -- steps ------------------------------------------------------------------------------

    def wait_for_turn(self, most_ahead: int | None) -> int:
        """Waits until this worker is at most `most_ahead` steps ahead of the slowest.

        It first uses the table as of this worker's last step: since then the others can only have
        advanced, so the difference is never underestimated.

        Returns:
            The number of steps that this worker is ahead.
        """
        delay = 0.001
        while True:
            with self._lock:
                slowest = self._slowest(self._seen, empty=self.clock)
                ahead = max(int(self.clock - slowest), 0)
            if most_ahead is None or ahead <= most_ahead:
                return ahead
            time.sleep(delay)
            delay = min(2 * delay, _LONGEST_LOOK_SECONDS)
            self._seen = self.read()

    def tick(self) -> tuple[np.ndarray, np.ndarray]:
        """Counts a step, and returns the feeds that record it in the table."""
        with self._lock:
            self.clock += 1
            return self.cells(clock=self.clock)

    def see(self, table: np.ndarray) -> None:
        """Stores the table that a step has fetched."""
        self._seen = table

    def _slowest(self, table: np.ndarray, *, others_only: bool = False, empty: int = _NEVER) -> int:
        """The smallest step count of the workers in this `fit`; `empty` if there are none."""
        late = time.monotonic() - self._begun > self._startup
        found = []
        for worker, row in enumerate(table):
            if others_only and worker == self._index:
                continue
            if row[_STATE] in (_LEFT_OUT, _GONE) or row[_FINISHED] >= self.fit:
                continue
            if row[_STATE] == _UNSEEN and late:
                continue
            found.append(int(row[_CLOCK]) if row[_STARTED] >= self.fit else 0)
        return min(found, default=empty)

    def all_have_ended(self) -> bool:
        """Whether no worker takes part any more. Leaves out workers without a heartbeat."""
        table = self.read()
        self.leave_out_silent(table)
        late = time.monotonic() - self._begun > self._startup
        states = table[:, _STATE]
        return not (states == _PRESENT).any() and (late or not (states == _UNSEEN).any())

    def present(self) -> tuple[np.ndarray, np.ndarray]:
        """For each worker: whether it takes part or may still start, and whether it also is in this `fit`."""
        table = self.read()
        late = time.monotonic() - self._begun > self._startup
        present = np.isin(table[:, _STATE], (_PRESENT,) if late else (_PRESENT, _UNSEEN))
        return present, present & (table[:, _FINISHED] < self.fit)

    def is_gone(self, worker: int) -> bool:
        """Whether a worker has ended or is left out."""
        return int(self.read()[worker, _STATE]) in (_LEFT_OUT, _GONE)

    # -- signs of life ----------------------------------------------------------------------

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_SECONDS):
            self._beats += 1
            try:
                table = self.write(beat=self._beats)
                self._come_back(table)
                self.leave_out_silent(table)
            except ParameterServerError as error:
                _logger.info("tfdist: no more signs of life: %s", error)
                return  # The current step raises the error.

    def _come_back(self, table: np.ndarray) -> None:
        """Lets a worker that was left out resume at the step of the slowest."""
        if table[self._index, _STATE] != _LEFT_OUT:
            return
        with self._lock:
            slowest = self._slowest(table, others_only=True, empty=self.clock)
            self.clock = max(self.clock, slowest)
            self.write(state=_PRESENT, clock=self.clock)
        _logger.warning("tfdist: worker %d takes part again.", self._index)

    def leave_out_silent(self, table: np.ndarray) -> None:
        """Leaves out workers that have sent no heartbeat for too long."""
        now = time.monotonic()
        for worker, row in enumerate(table):
            if worker == self._index or row[_STATE] != _PRESENT:
                self._heard.pop(worker, None)
                continue
            beat, since = self._heard.get(worker, (-1, now))
            if beat != row[_BEAT]:
                self._heard[worker] = int(row[_BEAT]), now
            elif now - since > self._silent:
                _logger.warning(
                    "tfdist: worker %d has sent no heartbeat for %.0f s and is left out; the other "
                    "workers continue.",
                    worker,
                    now - since,
                )
                self._run(np.array([[worker, _STATE]]), np.array([_LEFT_OUT]))


_NAMES = {
    "started": _STARTED,
    "finished": _FINISHED,
    "clock": _CLOCK,
    "beat": _BEAT,
    "state": _STATE,
}


def wait(
    condition: Callable[[], bool],
    seconds: float,
    what: str,
    longest: float = 10 * _LONGEST_LOOK_SECONDS,
) -> None:
    """Waits for a condition, which is checked at least every `longest` seconds.

    Raises:
        ParameterServerError: The condition did not become true in time; `what` names it in the message.
    """
    end, delay = time.monotonic() + seconds, 0.001
    while not condition():
        if time.monotonic() > end:
            raise ParameterServerError(f"Expected {what} within {seconds:.0f} s.")
        time.sleep(delay)
        delay = min(2 * delay, longest)
