"""Hooks before and after each call of a model's training function by `fit`.

They patch `CallbackList`, since a wrapper of the training function would be in the stack of everything that
a step traces.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras

from tfdist.backend.keras.patching import Patch, apply_patches

#: By model, the functions to be called before and after.
_watchers: weakref.WeakKeyDictionary[Any, list[tuple]] = weakref.WeakKeyDictionary()


def watch_calls(
    model: keras.Model, begin: Callable[[], None], end: Callable[[], None]
) -> Callable[[], None]:
    """Calls functions before and after each call of the training function, in the thread that trains.

    Args:
        model: The model.
        begin: Called before it, after all callbacks' `on_train_batch_begin`.
        end: Called after it, unless the data has ended or the call has raised.

    Returns:
        A function that removes the hooks.
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
