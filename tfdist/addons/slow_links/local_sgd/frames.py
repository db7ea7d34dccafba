"""The callbacks around those of the user: at the end of an epoch, and in validation, parameters are global."""

from __future__ import annotations

import contextlib

import keras

from tfdist.step.local_steps import LocalSteps


class ShowGlobal(keras.callbacks.Callback):
    """Before the others: the parameters that ranks have agreed on last.

    Args:
        optimizer: The optimizer that trains them.

    Attributes:
        shown: Closed, it gives the model back what this rank trains.
    """

    async_safe = True

    def __init__(self, optimizer: LocalSteps):
        super().__init__()
        self._optimizer = optimizer
        self.shown = contextlib.ExitStack()

    def on_test_begin(self, logs=None):
        """Validation is of the global parameters."""
        self.shown.enter_context(self._optimizer.global_parameters())

    def on_epoch_end(self, epoch, logs=None):
        """So is what callbacks look at."""
        self.shown.enter_context(self._optimizer.global_parameters())


class ShowOwn(keras.callbacks.Callback):
    """After the others: this rank's own parameters again."""

    async_safe = True

    def __init__(self, first: ShowGlobal):
        super().__init__()
        self._first = first

    def on_test_end(self, logs=None):
        """Validation is over."""
        self._first.shown.close()

    def on_epoch_end(self, epoch, logs=None):
        """The epoch is over."""
        self._first.shown.close()
