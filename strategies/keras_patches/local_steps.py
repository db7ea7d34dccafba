"""Ranks that step apart: which parameters Keras and callbacks see, and where a `fit` begins.

Under an optimizer of `tfdist.optimizers` each rank trains parameters of its own. What is evaluated,
predicted with, saved and shown to callbacks at the end of an epoch is the model that ranks have
agreed on last: the same on all of them, and what a checkpoint holds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import keras

from tfdist.local_steps import local_optimizer

__all__ = ["framed", "global_parameters"]


def global_parameters(model) -> contextlib.AbstractContextManager:
    """Inside, a model has the parameters that ranks have agreed on last, where it trains apart."""
    local = local_optimizer(model) if isinstance(model, keras.Model) else None
    return contextlib.nullcontext() if local is None else local.global_parameters()


def framed(model: keras.Model, callbacks: Sequence) -> list:
    """The callbacks of a `fit` that begins anew; at the end of an epoch they see those parameters."""
    local = local_optimizer(model)
    if local is None:
        return list(callbacks)
    local.restart()
    first = _ShowGlobal(model)
    return [first, *callbacks, _ShowOwn(first)]


class _ShowGlobal(keras.callbacks.Callback):
    """Before the others: the global parameters."""

    async_safe = True

    def __init__(self, model: keras.Model):
        super().__init__()
        self._trained = model
        self._shown = contextlib.ExitStack()

    def on_epoch_end(self, epoch, logs=None):
        self._shown.enter_context(global_parameters(self._trained))

    def end(self) -> None:
        """Gives the model back what this rank trains."""
        self._shown.close()


class _ShowOwn(keras.callbacks.Callback):
    """After the others: this rank's own parameters again."""

    async_safe = True

    def __init__(self, first: _ShowGlobal):
        super().__init__()
        self._first = first

    def on_epoch_end(self, epoch, logs=None):
        self._first.end()
