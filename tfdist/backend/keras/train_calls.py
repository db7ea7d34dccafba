"""When `fit` calls a model's training function, and when that has returned.

`CallbackList` is the only place of Keras that both pass by; a function around the training function would
stand in the stack of everything that a step traces.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfdist.backend.keras.patching import Patch, apply_patches

#: By model what to call before and after.
_watchers: weakref.WeakKeyDictionary[Any, list[tuple[Callable, Callable]]] = (
    weakref.WeakKeyDictionary()
)


def watch_calls(
    model: keras.Model, begin: Callable[[], None], end: Callable[[], None]
) -> Callable[[], None]:
    """Calls functions around each call of the training function by `fit`, in the thread that trains.

    Args:
        model: The model.
        begin: Called before, after all callbacks' `on_train_batch_begin`.
        end: Called after; not where the data has ended instead, or the call has raised.

    Returns:
        What ends that.
    """
    apply_patches(_PATCHES)
    watcher = begin, end
    _watchers.setdefault(model, []).append(watcher)
    return lambda: _watchers[model].remove(watcher)


def _begin(self, batch, logs=None, *, original):
    original(self, batch, logs)
    for begin, _ in _watchers.get(self.model, ()):
        begin()


def _end(self, batch, logs=None, *, original):
    for _, end in _watchers.get(self.model, ()):
        end()
    original(self, batch, logs)


_PATCHES = (
    Patch(keras.callbacks.CallbackList, "on_train_batch_begin", ("self", "batch", "logs"), _begin),
    Patch(keras.callbacks.CallbackList, "on_train_batch_end", ("self", "batch", "logs"), _end),
)
