"""The callback that saves checkpoints during training, and resumes from the newest one."""

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
from tfdist.checkpoint.directory_lock import DirectoryLock
from tfdist.checkpoint.errors import report_in_one_line
from tfdist.checkpoint.fit_state import FitState, check_state
from tfdist.checkpoint.retention import Retention
from tfdist.checkpoint.saving import Save, Saver, lock_on, run_on_chief
from tfdist.checkpoint.space import report, space_report
from tfdist.checkpoint.storage import Storage
from tfdist.collectives import all_reduce
from tfdist.data.position import DataPosition
from tfdist.runtime.directories import checked_directory
from tfdist.runtime.exit_codes import PREEMPTED
from tfdist.runtime.recovery import note_newest
from tfdist.runtime.save_interval import young_daly
from tfdist.sharding.kept import kept_states_of
from tfdist.sharding.layout import variables_of
from tfdist.sharding.states import layer_states
from tfdist.step.hooks import FitContext, FitHook, fit_hooks
from tfdist.utils import checks
from tfdist.utils.lazy import find_addon

_logger = logging.getLogger("tfdist")
#: The interval at which ranks agree on whether to save.
_AGREE_SECONDS = 1.0


class Checkpointer(keras.callbacks.Callback, FitHook):
    """Saves checkpoints during `fit`, which resumes from the newest one when it is started again.

    A checkpoint contains all that determines the rest of the training: weights, optimizer, loss scale,
    metrics, the epoch and the position in the data, random states, the history, and the counters of
    EarlyStopping, ReduceLROnPlateau, ModelCheckpoint and SwapEMAWeights. A program that sets a seed and resumes on the
    same mesh ends with bitwise the same weights as one that was never interrupted. On a different mesh
    it resumes with the same samples.

    Files are written in the background. Training only waits for the copy of this rank's part, and for
    the previous save. On SIGTERM to any rank, all ranks save once and exit with code 76.

    Args:
        directory: The directory of the checkpoints: see `tfdist.checkpoint.save`.
        every_steps: The number of training steps between two saves.
        every_seconds: The number of seconds between two saves.
        every: "auto" for the interval that loses the least time by Daly's formula (`young_daly`), given
            the measured cost of a save and `failure_seconds`. The default, if neither steps nor seconds
            are given.
        failure_seconds: The mean time between failures of the whole job.
        keep_last: The number of the newest checkpoints to keep; None keeps all.
        keep_every: Checkpoints of steps that are multiples of this are never deleted.
        asynchronous: Whether training continues while a checkpoint is written.
        resume: Whether to resume from the newest checkpoint in `directory`, if there is one.
        batch_size: The number of samples of a global batch. Only required if it may change between a
            save and the next start, and is not part of the `element_spec` of the dataset.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of range, or more than one of `every_steps`, `every_seconds` and
            `every` is given.
    """

    # The end of a batch is only counted, which Keras may do in parallel with the next step.
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
                "`every_steps`, `every_seconds` and `every` cannot be combined. Received: "
                f"{', '.join(f'{name}={value!r}' for name, value in chosen.items())}. Pass only one."
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
        self._position.batch_size, self._position.put_back = self._batch_size, self._put_back
        # Before another callback begins the epoch, and changes the rate or the weights, wherever this one is.
        first = keras.callbacks.LambdaCallback(on_epoch_begin=self._begin_epoch)
        fit.arguments["callbacks"] = [first, *self._callbacks]
        try:
            yield
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Cleans up at the end of `fit`, also after an exception."""
        self._position = None
        if self.model is not None:  # Else `fit` has failed before training.
            initial_epoch.set(self.model, None)
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
        self._before = None
        if self._directory_lock is not None:
            # The lock is held until an unfinished save has ended.
            if self._under_way is not None:
                self._under_way.give_up()
                self._under_way = None
            self._directory_lock.release()
            self._directory_lock = None

    # -- the training ---------------------------------------------------------------------------

    def on_train_begin(self, logs=None):
        """Resumes from the newest checkpoint, if there is one."""
        strategy: Any = self.model.distribute_strategy
        if self._position is None or not hasattr(strategy, "engine"):
            raise ValueError(
                "Checkpointer requires `fit` of a model that was made in the scope of a strategy of "
                f"tfdist. Received: a model under {type(strategy).__name__}. Use "
                "`tfdist.strategies.LocalStrategy` for a single process."
            )
        self._group = strategy.group()
        self._kept = kept_states_of(self.model, fit_hooks(self.model, self._callbacks))
        self._state = FitState(self.model, self._position, self._callbacks, self._kept)
        self._saver: Saver | None = None
        self._known: list[int] = []
        self._step = self._epoch_step = self._first_batch = self._ended = 0
        self._resumed: dict[str, Any] | None = None
        report_in_one_line()
        self._directory_lock = lock_on(self.directory, self._group)
        has_checkpoint = run_on_chief(self._prepare_directory, self._group, "latest")
        recoveries = find_addon("monitoring.recovery") if self._group.rank == 0 else None
        self._recovery = None if recoveries is None else recoveries.Recovery(self.directory)
        if has_checkpoint and self._resumes:
            self._restore()
        self._report_space()
        self._saved_step, self._saved_at = self._step, time.monotonic()
        self._costs = self._writes = 0.0
        self._looked_step, self._looked_at = self._step, self._saved_at
        self._next_look = self._step + 1
        self._terminated.clear()
        if threading.current_thread() is threading.main_thread():
            # Later ones have no effect: schedulers and launchers repeat the signal while ranks save.
            self._before = signal.signal(signal.SIGTERM, lambda *_: self._terminated.set())

    def _prepare_directory(self) -> bool:
        """On the chief: tests whether the directory is writable; returns if it has checkpoints."""
        # Deletes the files of failed saves, which may have filled the disk.
        self._retention.begin()
        Storage(self.directory).check_writable()
        if any(folders(self.directory).values()):
            return True
        for line in lost(self.directory):
            _logger.warning("%s Training starts from scratch.", line)
        return False

    def _restore(self) -> None:
        begun = time.monotonic()
        # Imported only where there is a checkpoint.
        from tfdist.checkpoint.restoring import restore_checked

        manifest = restore_checked(self.directory, self.model, check_state, self._kept)
        self._resumed, self._step = manifest.state, manifest.step
        self._resumed_batch = self._state.resume(manifest.state)
        # Saved here, because `fit` now broadcasts the chief's variables, and then resets metrics.
        counted = [v for metric in self.model.metrics for v in metric.variables]
        counted += layer_states(self.model)
        # Callbacks may change it when the epoch begins, for the second time.
        counted += [v for v in variables_of(self.model) if v.name == "learning_rate"]
        self._counted = [(variable, variable.numpy()) for variable in counted]
        epoch = manifest.state["epoch"]
        _logger.info("Training resumes from step %d, epoch %d.", self._step, epoch)
        if self._recovery is not None:
            self._recovery.restored(self._step, time.monotonic() - begun)

    def _begin_epoch(self, epoch: int, logs: Any) -> None:
        """Saves if it is time; restores metrics in the first epoch after a resume."""
        self._first_batch = 0
        self._epoch, self._epoch_step, self._ended = epoch, self._step, 0
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._state.resume_callbacks(resumed)
            self._first_batch = self._resumed_batch
            return
        self._save_if_due(0)

    def _put_back(self) -> None:
        for variable, value in self._counted:
            variable.assign(value)

    def on_train_batch_begin(self, batch, logs=None):
        """Saves the state after the previous step, if it is time."""
        self._step = self._epoch_step + batch - self._first_batch
        self._report_recovery()
        if self._step > self._saved_step:
            self._save_if_due(batch)

    def on_train_batch_end(self, batch, logs=None):
        """Counts batches."""
        with self._lock:
            self._ended = max(self._ended, batch + 1 - self._first_batch)

    def on_epoch_end(self, epoch, logs=None):
        """Counts steps."""
        self._step = self._epoch_step + self._ended

    def on_train_end(self, logs=None):
        """Saves the final state, and waits for it."""
        if self._resumed is not None:  # No epoch was left to train.
            self._state.resume_callbacks(self._resumed)
        elif self._step > self._saved_step:
            # A training that a callback has stopped does not resume when it is started again.
            self._save(self.params["epochs"] if self.model.stop_training else self._epoch + 1, 0)
        self._report_recovery()
        _, ends = self._agree()
        self._finish()
        if ends:
            self._end()

    def _report_space(self) -> None:
        """Reports the space of checkpoints, unless the first step creates more variables."""
        optimizer = self.model.optimizer
        if self.model.built and optimizer is not None and optimizer.built:
            text = space_report(self.directory, self.model, self._group, self._keep_last)
            if text is not None:
                report(text, self.params.get("verbose", 0))

    def _report_recovery(self) -> None:
        """Reports the time of a recovery once it is over."""
        if self._recovery is not None and (said := self._recovery.report(self._step)):
            report(said, self.params.get("verbose", 0))

    # -- when -----------------------------------------------------------------------------------

    def _save_if_due(self, batch: int) -> None:
        """Saves if it is time; all ranks call this at the same step."""
        with timer("checkpoint"):
            due = ends = False
            if self._every_steps:
                due = self._step // self._every_steps > self._saved_step // self._every_steps
            if self._step >= self._next_look:
                timed, ends = self._agree()
                due = due or timed or ends
            if due and self._step > self._saved_step:
                self._save(self._epoch, batch)
            if ends:
                self._finish()
                self._end()

    def _agree(self) -> tuple[bool, bool]:
        """Whether to save by the chief's clock, and whether a rank has received SIGTERM."""
        now = time.monotonic()
        timed, ahead = False, 0
        if self._group.rank == 0:
            step_seconds = (now - self._looked_at) / max(1, self._step - self._looked_step)
            left = self._seconds_left(now)
            if self._recovery is not None:
                self._recovery.write(self._step)
            timed = left <= step_seconds / 2
            within = _AGREE_SECONDS if timed else min(_AGREE_SECONDS, left)
            ahead = max(1, math.floor(within / max(step_seconds, 1e-6)))
        said = tf.constant([timed, self._terminated.is_set(), ahead], tf.int32)
        timed, ends, ahead = all_reduce(said, self._group, "max", name="checkpoint/agree").numpy()
        self._looked_step, self._looked_at = self._step, now
        self._next_look = self._step + int(ahead)
        return bool(timed), bool(ends)

    def _seconds_left(self, now: float) -> float:
        """The time until the next save, if saves depend on time."""
        if self._every_steps:
            return math.inf
        interval = self._every_seconds
        if interval is None:
            # The first save is immediate, and its cost determines the interval of the others.
            interval = young_daly(self._costs, self._failure_seconds) if self._costs else 0.0
            interval = max(interval, self._writes)
        return interval - (now - self._saved_at)

    # -- saving ---------------------------------------------------------------------------------

    def _save(self, epoch: int, batch: int) -> None:
        begun = time.monotonic()
        self._finish()
        known = [id(variable) for variable in variables_of(self.model)]
        if self._saver is None or known != self._known:  # A step may create some later.
            self._saver, self._known = Saver(self.directory, self.model, self._kept), known
        state = self._state.collect(epoch, batch)
        self._under_way = self._saver.begin(self._step, state, self._completed)
        if not self._asynchronous:
            self._finish()
        self._saved_step, self._saved_at = self._step, time.monotonic()
        self._costs = self._saved_at - begun

    def _completed(self, path: str) -> None:
        """Called on the chief when a checkpoint was verified."""
        self._retention.completed(path)
        note_newest(path)

    def _finish(self) -> None:
        """Waits for the save in progress."""
        save, self._under_way = self._under_way, None
        if save is not None:
            save.wait()
            self._writes = save.seconds

    # -- SIGTERM --------------------------------------------------------------------------------

    def _end(self) -> None:
        self._before = None  # A SIGTERM must not change the exit code of a process that is ending.
        if self._group.rank == 0:
            _logger.warning("Received SIGTERM: saved after step %d.", self._step)
        raise SystemExit(PREEMPTED)
