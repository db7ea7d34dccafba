"""Callbacks around the user's: at the end of an epoch and in validation, parameters are global."""

from __future__ import annotations

import contextlib

import keras

from tfdist.step.local_steps import LocalSteps


class ShowGlobal(keras.callbacks.Callback):
    """Sets the model to the global parameters before the other callbacks run.

    Args:
        optimizer: The optimizer that trains them.

    Attributes:
        shown: Closing it restores this rank's own parameters.
    """

    async_safe = True

    def __init__(self, optimizer: LocalSteps):
        super().__init__()
        self._optimizer = optimizer
        self.shown = contextlib.ExitStack()

    def on_test_begin(self, logs=None):
        """Sets the global parameters, which validation uses."""
        self.shown.enter_context(self._optimizer.global_parameters())

    def on_epoch_end(self, epoch, logs=None):
        """Sets the global parameters, which other callbacks see."""
        self.shown.enter_context(self._optimizer.global_parameters())


class ShowOwn(keras.callbacks.Callback):
    """Restores this rank's own parameters after the other callbacks have run."""

    async_safe = True

    def __init__(self, first: ShowGlobal):
        super().__init__()
        self._first = first

    def on_test_end(self, logs=None):
        """Restores the own parameters after validation."""
        self._first.shown.close()

    def on_epoch_end(self, epoch, logs=None):
        """Restores the own parameters after the callbacks of an epoch."""
        self._first.shown.close()
