"""Callbacks on many ranks: all ranks make the same decisions, and only the chief writes files."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.collectives import all_reduce
from tfdist.collectives.objects import broadcast_object
from tfdist.step.context import role_of
from tfdist.step.hooks import FitHook
from tfdist.strategies.keras_patches.saving import restoring
from tfdist.strategies.keras_patches.synchronization import (
    broadcast_variables,
    synchronize_layer_states,
)
from tfdist.strategies.keras_patches.writers import WRITERS, note_restores, silence

_BATCH_ENDS = ("on_batch_end", "on_train_batch_end", "on_test_batch_end", "on_predict_batch_end")


def callbacks_of_rank(callbacks: Sequence, strategy, *, training: bool) -> list:
    """Returns the callbacks to run on this rank.

    The first and the last callback are of tfdist, and synchronize the ranks before the others read the model.
    Custom callbacks run on every rank: they receive the same logs, and should check `strategy.is_chief` before
    they write files.

    Args:
        callbacks: The user's callbacks, the same on all ranks.
        strategy: The strategy.
        training: Whether they are for `fit`.
    """
    own = list(callbacks)
    if not strategy.is_chief:
        own = [each for each in own if type(each) not in WRITERS or _reads_the_model(each)]
        for callback in own:
            silence(callback)
    if not training:
        return own
    return [_AgreeFirst(strategy, list(filter(_is_backup, own))), *own, _AgreeLast(strategy)]


def check_callbacks(callbacks: Sequence, model) -> None:
    """Checks that callbacks are supported for a model.

    Raises:
        ValueError: A pipeline with BackupAndRestore, whose files lack the optimizer's state.
    """
    if role_of(model).axes and any(map(_is_backup, callbacks)):
        raise ValueError(
            "BackupAndRestore is not supported for a PipelineModel: Keras' files lack the optimizer's "
            "state of a pipeline. Received: BackupAndRestore. Use ModelCheckpoint for the weights."
        )


def reads_batch_logs(callbacks: Sequence) -> bool:
    """Whether a callback may read the logs of a single batch."""
    reading = [callback for callback in callbacks if not _ignores_batch_logs(callback)]
    return any(_overrides(callback, name) for callback in reading for name in _BATCH_ENDS)


def _is_backup(callback) -> bool:
    return isinstance(callback, keras.callbacks.BackupAndRestore)


def _ignores_batch_logs(callback) -> bool:
    return (
        _is_backup(callback)
        or (isinstance(callback, FitHook) and not callback.reads_batch_logs)
        or (isinstance(callback, keras.callbacks.TensorBoard) and callback.update_freq == "epoch")
        or (isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq == "epoch")
    )


def _overrides(callback, name: str) -> bool:
    method = getattr(callback, name)
    return getattr(method, "__func__", method) is not getattr(keras.callbacks.Callback, name)


def _reads_the_model(callback) -> bool:
    """Whether a writer of Keras requires the other ranks."""
    return isinstance(callback, keras.callbacks.TensorBoard) and bool(
        # Reading split weights, as under ZeRO-3, is a collective.
        callback.embeddings_freq or callback.histogram_freq
    )


class _AgreeFirst(keras.callbacks.Callback):
    """Runs before the user's callbacks, so that all ranks have the same model for them."""

    # Keras may call the callbacks of a batch without waiting for it.
    async_safe = True

    def __init__(self, strategy, backups: Sequence):
        super().__init__()
        self._strategy, self._backups = strategy, backups

    def on_train_begin(self, logs=None):
        if not self._backups:
            return
        restoring.add(self._strategy)
        found = [tf.io.gfile.exists(backup._weights_path) for backup in self._backups]
        found = broadcast_object(found, self._strategy.group(), name="backups")
        for backup, restores in zip(self._backups, found, strict=True):
            note_restores(backup, restores)

    def on_epoch_end(self, epoch, logs=None):
        synchronize_layer_states(self.model)

    def on_train_end(self, logs=None):
        synchronize_layer_states(self.model)


class _AgreeLast(keras.callbacks.Callback):
    """Runs after the user's callbacks, to broadcast the state that they restored on the chief."""

    async_safe = True

    def __init__(self, strategy):
        super().__init__()
        self._strategy = strategy

    def on_epoch_end(self, epoch, logs=None):
        # A custom callback may decide by values that differ between ranks.
        stop = tf.constant(bool(self.model.stop_training))
        stop = all_reduce(stop, self._strategy.group(), "max", name="stop-training")
        self.model.stop_training = bool(stop)

    def on_train_begin(self, logs=None):
        restoring.discard(self._strategy)
        broadcast_variables(self.model)
        # Keras' attribute for the epoch that a callback restored: `fit` reads it right after this.
        epoch, group = self.model._initial_epoch, self._strategy.group()
        self.model._initial_epoch = broadcast_object(epoch, group, name="initial-epoch")
