"""`fit` under parameter servers: the state that callbacks see, and the steps that it skips."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdist.addons.asynchronous.store import ParameterStore
from tfdist.addons.asynchronous.strategies import overridden
from tfdist.backend.keras.attributes import initial_epoch


class First(keras.callbacks.Callback):
    """Runs before the user's callbacks, so that they see the servers' parameters and counts."""

    def __init__(self, strategy: Any):
        super().__init__()
        self._strategy, self._store = strategy, strategy._store

    def on_epoch_begin(self, epoch, logs=None):
        """Resets the counts."""
        self._store.start_counting()

    def on_test_begin(self, logs=None):
        """Copies the servers' values, which validation uses."""
        self._strategy.before_reading(self.model)

    def on_epoch_end(self, epoch, logs=None):
        """Copies the servers' values, and logs their counts."""
        hosted = self._strategy._host(self.model)
        self._store.refresh(hosted, with_optimizer=self._store.is_chief)
        if logs is not None:
            logs.update(self._store.logs(hosted))

    def on_train_end(self, logs=None):
        """Waits for the other workers."""
        self._store.finish_fit(self._strategy._host(self.model))


class Last(keras.callbacks.Callback):
    """Runs after the user's callbacks, and publishes to all workers the state restored on the chief."""

    def __init__(self, strategy: Any):
        super().__init__()
        self._strategy, self._store = strategy, strategy._store

    def on_train_begin(self, logs=None):
        """Publishes on the chief; the other workers start at its epoch, or at the current one."""
        hosted = self._strategy._host(self.model)
        epoch = self._store.publish(hosted, initial_epoch(self.model))
        if epoch is not None:
            # The attribute where Keras stores the epoch that a callback restored; `fit` reads it next.
            epoch += self._store.begin_late(hosted, self.params.get("steps") or sys.maxsize)
            initial_epoch.set(self.model, epoch)


@contextlib.contextmanager
def catching_up(model: keras.Model, store: ParameterStore) -> Iterator[None]:
    """Makes a late worker skip the batches of steps that others have made, in its context.

    A backup, which has no batches, redoes those of others.

    Args:
        model: The model.
        store: The servers.
    """
    if not store.has_backup:
        yield
        return
    found = _CatchingUp(model, store) if store.shards is None else _Redoing(model, store)
    try:
        with overridden(model, "make_train_function", found.make):
            yield
    finally:
        found.remove()


class _CatchingUp:
    """Wraps a model's training function: skips batches of steps that others have made.

    Args:
        model: The model.
        store: The servers.
    """

    def __init__(self, model: keras.Model, store: ParameterStore):
        self._model, self._store = model, store
        self._function: Callable | None = None
        self._logs: Any = None

    def make(self, force: bool = False) -> None:
        """Makes Keras' function, and wraps it."""
        model = self._model
        if model.train_function == self._call and not force:
            return
        type(model).make_train_function(model, force)
        self._function, model.train_function = model.train_function, self._call

    def remove(self) -> None:
        """Restores the model's own function."""
        if self._model.train_function == self._call:
            self._model.train_function = self._function

    def _call(self, iterator):
        if self._function is None:
            raise RuntimeError(
                "The training function could not be called. Expected: a call of `make` before."
            )
        self._step(self._function, iterator)
        return self._logs

    def _step(self, function: Callable, iterator: Any) -> None:
        steps = self._model.steps_per_execution
        for done in range(steps):
            # A step must return the same logs as the others, so the first one is never skipped.
            is_behind = self._logs is not None and self._store.is_behind()
            try:
                if is_behind:
                    next(iterator)
                else:
                    # Only some of several steps may be skipped, so Keras gets one batch per call.
                    self._logs = function(iterator if steps == 1 else [next(iterator)])
            except StopIteration:
                if not done:
                    raise
                return
            # Only now: at the end of the data there is nothing to skip.
            if is_behind:
                self._store.skip()


class _Redoing(_CatchingUp):
    """Wraps a backup's training function: redoes, in each step, batches of workers that are late.

    Its iterator yields the batches of all workers.
    """

    def _step(self, function: Callable, iterator: Any) -> None:
        batches = [next(iterator) for _ in range(self._store.shards or 0)]
        while (shard := self._store.next_shard()) is not None:
            # Keras' function accepts an iterator of a dataset or any other iterable of batches.
            self._logs = function([batches[shard]])
