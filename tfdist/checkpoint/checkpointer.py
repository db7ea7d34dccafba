"""The callback that saves a training, and lets it go on where the last save stands."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.clock.stamps import timer
from tfdist.backend.keras.attributes import initial_epoch
from tfdist.checkpoint.directory import folders, lost
from tfdist.checkpoint.directory_lock import DirectoryLock, InUseError
from tfdist.checkpoint.fit_state import FitState, check_state
from tfdist.checkpoint.recovery import Progress, Recovery, room_words, tell
from tfdist.checkpoint.reporting import report_in_one_line
from tfdist.checkpoint.restoring import restore_checked
from tfdist.checkpoint.retention import Retention
from tfdist.checkpoint.saving import Save, Saver, lock_on
from tfdist.checkpoint.storage import Storage, StorageError
from tfdist.collectives import all_reduce
from tfdist.collectives.objects import broadcast_object
from tfdist.data.position import DataPosition
from tfdist.runtime.directories import checked_directory
from tfdist.runtime.exit_codes import PREEMPTED
from tfdist.runtime.recovery import down_since, note_newest
from tfdist.runtime.save_interval import young_daly
from tfdist.sharding.kept import kept_states_of
from tfdist.sharding.states import layer_states
from tfdist.step.hooks import FitContext, FitHook, fit_hooks
from tfdist.utils import checks

_logger = logging.getLogger("tfdist")
#: How far apart, in time, the ranks agree on whether to save.
_AGREE_SECONDS = 1.0


class Checkpointer(keras.callbacks.Callback, FitHook):
    """Saves while `fit` trains; a `fit` that is started again goes on from the last save.

    What is saved is all that decides how training goes on: weights, optimizer, loss scale, metrics,
    the epoch and the place in the data, random states, the history, and what EarlyStopping,
    ReduceLROnPlateau and ModelCheckpoint have counted. A program that sets a seed and goes on upon
    the same mesh ends with the very weights of one that was never interrupted. On another mesh, too,
    it goes on with the same samples.

    Writing goes on beside training, which waits only for the copy of this rank's part; one save at
    a time is under way. On SIGTERM, to any rank, all ranks save once and exit with code 76.

    Args:
        directory: Where checkpoints are kept: see `tfdist.checkpoint.save`.
        every_steps: Saves every so many training steps.
        every_seconds: Saves every so many seconds.
        every: "auto" saves as often as loses the least, by Daly's formula (`young_daly`), from what
            a save was measured to cost and `failure_seconds`. The default, where neither steps nor
            seconds are given.
        failure_seconds: The mean time between failures of the whole job.
        keep_last: How many of the newest checkpoints are kept; None keeps all.
        keep_every: Checkpoints of every step that this divides are kept for good.
        asynchronous: Whether training goes on while a checkpoint is written.
        resume: Whether to go on from the last checkpoint in `directory`, where there is one.
        batch_size: The samples of a global batch. Only needed where it may change between a save
            and the next start, and the data set does not tell it by its `element_spec`.

    Raises:
        TypeError: An argument has another type.
        ValueError: An argument is out of its range, or more than one of `every_steps`,
            `every_seconds` and `every` is given.
    """

    # What it does at the end of a batch is counting, which Keras may do beside the next step.
    async_safe = True
    reads_batch_logs = False

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        every: str | None = None,
        failure_seconds: float = 6 * 3600.0,
        keep_last: int | None = 2,
        keep_every: int | None = None,
        asynchronous: bool = True,
        resume: bool = True,
        batch_size: int | None = None,
    ):
        super().__init__()
        given = {"every_steps": every_steps, "every_seconds": every_seconds, "every": every}
        chosen = {name: value for name, value in given.items() if value is not None}
        if len(chosen) > 1:
            raise ValueError(
                "Saves follow one of `every_steps`, `every_seconds` and `every`. Received: "
                f"{', '.join(f'{name}={value!r}' for name, value in chosen.items())}."
            )
        checks.one_of("every", every, ("auto",), optional=True)
        self.directory = checked_directory(directory)
        checks.integer("every_steps", every_steps, minimum=1, optional=True)
        checks.number("every_seconds", every_seconds, above=0, optional=True)
        checks.number("failure_seconds", failure_seconds, above=0)
        checks.integer("batch_size", batch_size, minimum=1, optional=True)
        checks.boolean("asynchronous", asynchronous)
        checks.boolean("resume", resume)
        self._every_steps, self._every_seconds = every_steps, every_seconds
        self._failure_seconds = failure_seconds
        self._asynchronous, self._resumes = asynchronous, resume
        self._batch_size = batch_size
        self._keep_last = keep_last
        self._retention = Retention(self.directory, keep_last, keep_every)
        self._position: DataPosition | None = None
        self._callbacks: Sequence = ()
        self._lock = threading.Lock()
        self._directory_lock: DirectoryLock | None = None
        self._under_way: Save | None = None
        self._before: Any = None
        self._terminated = threading.Event()

    @contextlib.contextmanager
    def around(self, fit: FitContext) -> Iterator[None]:
        """See `FitHook.around`."""
        if fit.kind != "fit":
            yield
            return
        self._position, self._callbacks = fit.position, fit.callbacks
        self._position.batch_size = self._batch_size
        try:
            yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """What `fit` leaves when it ends, well or not."""
        self._position = None
        if self.model is not None:  # Else `fit` has failed before it began.
            initial_epoch.set(self.model, None)
        if self._before is not None and not self._terminated.is_set():
            signal.signal(signal.SIGTERM, self._before)
        self._before = None
        if self._directory_lock is not None:
            # A save that is still under way holds the lock until it ends.
            save, self._under_way = self._under_way, None
            if save is not None:
                save.give_up()
            self._directory_lock.release()
            self._directory_lock = None

    # -- the training ---------------------------------------------------------------------------

    def on_train_begin(self, logs=None):
        """Goes on from the last checkpoint, where there is one."""
        strategy: Any = self.model.distribute_strategy
        if self._position is None or not hasattr(strategy, "engine"):
            raise ValueError(
                "Checkpointer works with the `fit` of a model that was made in the scope of a "
                f"strategy of tfdist. Received: a model under {type(strategy).__name__}. For one "
                "process there is `tfdist.strategies.LocalStrategy`."
            )
        self._group = strategy.group()
        self._kept = kept_states_of(self.model, fit_hooks(self.model, self._callbacks))
        self._state = FitState(self.model, self._position, self._callbacks, self._kept)
        self._saver: Saver | None = None
        self._under_way = None
        self._step = self._epoch_step = self._first_batch = self._ended = 0
        self._resumed: dict[str, Any] | None = None
        report_in_one_line()
        self._directory_lock = lock_on(self.directory, self._group)
        found_some = self._found_some()
        self._progress = Progress(self.directory) if self._group.rank == 0 else None
        self._recovery: Recovery | None = None
        if found_some and self._resumes:
            if self._progress is not None:
                self._recovery = Recovery(down_since(), self._progress.read())
            manifest = restore_checked(self.directory, self.model, check_state, self._kept)
            self._resumed, self._step = manifest.state, manifest.step
            self._resumed_batch = self._state.resume(manifest.state)
            # `fit` gives all ranks the chief's variables now, and then begins to count anew.
            counted = [v for metric in self.model.metrics for v in metric.variables]
            counted += layer_states(self.model)
            self._counted = [(variable, variable.numpy()) for variable in counted]
            _logger.info(
                "Training goes on from step %d, epoch %d.", self._step, manifest.state["epoch"]
            )
            if self._recovery is not None:
                self._recovery.note_loaded(self._step)
        self._tell_of_room()
        self._saved_step, self._saved_at = self._step, time.monotonic()
        self._costs = self._writes = 0.0
        self._looked_step, self._looked_at, self._next_look = (
            self._step,
            time.monotonic(),
            self._step + 1,
        )
        self._terminated.clear()
        self._handle_sigterm()

    def on_epoch_begin(self, epoch, logs=None):
        """Saves what the epoch before has left; gives back what was counted."""
        self._first_batch = 0
        self._epoch, self._epoch_step, self._ended = epoch, self._step, 0
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._state.resume_callbacks(resumed)
            self._first_batch = self._resumed_batch
            if self._first_batch:
                for variable, value in self._counted:
                    variable.assign(value)
            return
        self._save_if_due(0)

    def on_train_batch_begin(self, batch, logs=None):
        """Saves what the step before has left, where it is time."""
        self._step = self._epoch_step + batch - self._first_batch
        self._tell_of_recovery()
        if self._step > self._saved_step:
            self._save_if_due(batch)

    def on_train_batch_end(self, batch, logs=None):
        """Counts."""
        with self._lock:
            self._ended = max(self._ended, batch + 1 - self._first_batch)

    def on_epoch_end(self, epoch, logs=None):
        """Counts."""
        self._step = self._epoch_step + self._ended

    def on_train_end(self, logs=None):
        """Saves the end, and waits for it."""
        if self._resumed is not None:  # Nothing was left to train.
            self._state.resume_callbacks(self._resumed)
        elif self._step > self._saved_step:
            # A training that a callback has stopped does not go on when it is started again.
            self._save(self.params["epochs"] if self.model.stop_training else self._epoch + 1, 0)
        self._tell_of_recovery()
        _, ends = self._agree()
        self._finish()
        if ends:
            self._end()

    def _tell_of_room(self) -> None:
        """What checkpoints take, beside the free space; not where the first step makes variables."""
        optimizer = self.model.optimizer
        if self.model.built and optimizer is not None and optimizer.built:
            said = room_words(self.directory, self.model, self._group, self._keep_last)
            if said is not None:
                tell(said, self.params.get("verbose", 0))

    def _tell_of_recovery(self) -> None:
        """How long it took, once training is back where it was."""
        if self._recovery is not None and self._recovery.is_over(self._step):
            tell(self._recovery.words(), self.params.get("verbose", 0))
            self._recovery = None

    def _found_some(self) -> bool:
        """Whether there is a checkpoint; raises on all ranks where none can be written."""
        found: Any = False
        if self._group.rank == 0:
            try:
                # First what a failed save has left: it may have filled the disk.
                self._retention.begin(is_chief=True)
                Storage(self.directory).check_writable()
                found = any(folders(self.directory).values())
                if not found:
                    for line in lost(self.directory):
                        _logger.warning("%s Training begins anew.", line)
            except StorageError as error:
                found = error
        found = broadcast_object(found, self._group, name="checkpoint/latest")
        if isinstance(found, StorageError):
            raise found
        return found

    # -- when -----------------------------------------------------------------------------------

    def _save_if_due(self, batch: int) -> None:
        """Saves where it is time; all ranks come here at the same step."""
        with timer("checkpoint"):
            self._save_now_if_due(batch)

    def _save_now_if_due(self, batch: int) -> None:
        due = False
        if self._every_steps:
            due = self._step // self._every_steps > self._saved_step // self._every_steps
        ends = False
        if self._step >= self._next_look:
            timed, ends = self._agree()
            due = due or timed or ends
        if due and self._step > self._saved_step:
            self._save(self._epoch, batch)
        if ends:
            self._finish()
            self._end()

    def _agree(self) -> tuple[bool, bool]:
        """Whether time says to save, as the chief's clock has it, and whether some rank is to end."""
        now = time.monotonic()
        timed, ahead = False, 0
        if self._group.rank == 0:
            step_seconds = (now - self._looked_at) / max(1, self._step - self._looked_step)
            left = self._seconds_left(now)
            if self._progress is not None:
                self._progress.write(self._step)
            timed = left <= step_seconds / 2
            within = _AGREE_SECONDS if timed else min(_AGREE_SECONDS, left)
            ahead = max(1, math.floor(within / max(step_seconds, 1e-6)))
        said = tf.constant([timed, self._terminated.is_set(), ahead], tf.int32)
        timed, ends, ahead = all_reduce(said, self._group, "max", name="checkpoint/agree").numpy()
        self._looked_step, self._looked_at = self._step, now
        self._next_look = self._step + int(ahead)
        return bool(timed), bool(ends)

    def _seconds_left(self, now: float) -> float:
        """Until the next save that goes by time."""
        if self._every_steps:
            return math.inf
        interval = self._every_seconds
        if interval is None:
            # The first save comes at once, and is what the others are planned by.
            interval = young_daly(self._costs, self._failure_seconds) if self._costs else 0.0
            interval = max(interval, self._writes)
        return interval - (now - self._saved_at)

    # -- saving ---------------------------------------------------------------------------------

    def _save(self, epoch: int, batch: int) -> None:
        begun = time.monotonic()
        self._finish()
        if self._saver is None:
            self._saver = Saver(self.directory, self.model, self._kept)
        state = self._state.collect(epoch, batch)
        self._under_way = self._saver.begin(self._step, state, self._completed)
        if not self._asynchronous:
            self._finish()
        self._saved_step, self._saved_at = self._step, time.monotonic()
        self._costs = self._saved_at - begun

    def _completed(self, path: str) -> None:
        """On the chief, when a checkpoint was read back whole."""
        if self._directory_lock is not None:
            try:
                self._directory_lock.check()
            except InUseError as error:
                raise StorageError(str(error)) from error
        self._retention.completed(path)
        note_newest(path)

    def _finish(self) -> None:
        """Waits for the save that is under way."""
        if self._under_way is None:
            return
        save, self._under_way = self._under_way, None
        save.wait()
        self._writes = save.seconds

    # -- SIGTERM --------------------------------------------------------------------------------

    def _handle_sigterm(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number, frame) -> None:
        self._terminated.set()
        # Who sends it a second time does not want to wait.
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)

    def _end(self) -> None:
        if self._group.rank == 0:
            _logger.warning("Told to end: saved after step %d.", self._step)
        raise SystemExit(PREEMPTED)
