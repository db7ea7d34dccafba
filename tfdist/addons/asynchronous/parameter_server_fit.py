"""`fit` under parameter servers: what its callbacks see, and the steps that it leaves out."""

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
    """Runs before the user's callbacks: they see the servers' parameters, and what was counted."""

    def __init__(self, strategy: Any):
        super().__init__()
        self._strategy, self._store = strategy, strategy._store

    def on_epoch_begin(self, epoch, logs=None):
        """Counts anew."""
        self._store.start_counting()

    def on_test_begin(self, logs=None):
        """Validation is of what the servers hold."""
        self._strategy.before_reading(self.model)

    def on_epoch_end(self, epoch, logs=None):
        """Copies what the servers hold, and logs what they count."""
        hosted = self._strategy._host(self.model)
        self._store.refresh(hosted, with_optimizer=self._store.is_chief)
        if logs is not None:
            logs.update(self._store.logs(hosted))

    def on_train_end(self, logs=None):
        """Waits for the others."""
        self._store.finish_fit(self._strategy._host(self.model))


class Last(keras.callbacks.Callback):
    """Runs after the user's callbacks: what they restored on the chief becomes everybody's."""

    def __init__(self, strategy: Any):
        super().__init__()
        self._strategy, self._store = strategy, strategy._store

    def on_train_begin(self, logs=None):
        """The chief publishes; the others begin where it did, or where all are."""
        hosted = self._strategy._host(self.model)
        epoch = self._store.publish(hosted, initial_epoch(self.model))
        if epoch is not None:
            # Keras' own place for what a callback restored: `fit` reads it right after this.
            epoch += self._store.begin_late(hosted, self.params.get("steps") or sys.maxsize)
            initial_epoch.set(self.model, epoch)


@contextlib.contextmanager
def catching_up(model: keras.Model, store: ParameterStore) -> Iterator[None]:
    """Inside, a worker that is late leaves out batches of steps that others have made.

    And a backup redoes batches of others, where it has none of its own.

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
    """Stands for a model's training function: leaves out batches of steps that others have made.

    Args:
        model: The model.
        store: The servers.
    """

    def __init__(self, model: keras.Model, store: ParameterStore):
        self._model, self._store = model, store
        self._function: Callable | None = None
        self._logs: Any = None

    def make(self, force: bool = False) -> None:
        """Keras' own, and then this."""
        model = self._model
        if model.train_function == self._call and not force:
            return
        type(model).make_train_function(model, force)
        self._function, model.train_function = model.train_function, self._call

    def remove(self) -> None:
        """Leaves the model its own."""
        if self._model.train_function == self._call:
            self._model.train_function = self._function

    def _call(self, iterator):
        if self._function is None:
            raise RuntimeError("A training function was called that was not made yet.")
        self._step(self._function, iterator)
        return self._logs

    def _step(self, function: Callable, iterator: Any) -> None:
        steps = self._model.steps_per_execution
        for done in range(steps):
            # What the first step returns is what the others return.
            is_behind = self._logs is not None and self._store.is_behind()
            try:
                if is_behind:
                    next(iterator)
                else:
                    # Of several steps one may be left out, and others not: Keras gets a batch of each.
                    self._logs = function(iterator if steps == 1 else [next(iterator)])
            except StopIteration:
                if not done:
                    raise
                return
            # Not before: where the data ends there is nothing to leave out.
            if is_behind:
                self._store.skip()


class _Redoing(_CatchingUp):
    """Stands for a backup's training function: in a step, redoes batches of workers that are late.

    Its iterator yields the batches of all workers.
    """

    def _step(self, function: Callable, iterator: Any) -> None:
        batches = [next(iterator) for _ in range(self._store.shards or 0)]
        while (shard := self._store.next_shard()) is not None:
            # Of Keras' own, an iterator of a data set or any other of batches.
            self._logs = function([batches[shard]])
