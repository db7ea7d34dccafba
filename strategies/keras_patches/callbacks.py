"""Callbacks on many ranks: all decide alike, the chief alone writes."""

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

__all__ = ["callbacks_of_rank", "check_callbacks", "reads_batch_logs"]

_BATCH_ENDS = ("on_batch_end", "on_train_batch_end", "on_test_batch_end", "on_predict_batch_end")


def callbacks_of_rank(callbacks: Sequence, strategy, *, training: bool) -> list:
    """Returns the callbacks that this rank runs.

    The list is framed by two of tfdist's own, which bring the ranks together before the others
    look at the model. Callbacks of the user's own run on every rank: they see the same logs, and
    one that writes files asks `strategy.is_chief`.

    Args:
        callbacks: The user's, the same on all ranks.
        strategy: The strategy.
        training: Whether they are for `fit`.
    """
    own = list(callbacks)
    if not strategy.is_chief:
        own = [follower for callback in own if (follower := _on_follower(callback)) is not None]
    if not training:
        return own
    backups = [c for c in own if isinstance(c, keras.callbacks.BackupAndRestore)]
    return [_AgreeFirst(strategy, backups), *own, _AgreeLast(strategy)]


def check_callbacks(callbacks: Sequence, model) -> None:
    """Refuses what a model on many ranks cannot do.

    Raises:
        ValueError: A backup of a pipeline, whose files lack the optimizer's state.
    """
    is_pipeline = bool(role_of(model).axes)
    if is_pipeline and any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks):
        raise ValueError(
            "Keras' files do not hold the optimizer's state of a pipeline, so training would not "
            "go on as it was. Received: BackupAndRestore for a PipelineModel. Take ModelCheckpoint "
            "for the weights."
        )


def reads_batch_logs(callbacks: Sequence) -> bool:
    """Whether some callback may look at the logs of a single batch."""
    return any(
        _overrides(callback, name)
        for callback in callbacks
        if not _ignores_batch_logs(callback)
        for name in _BATCH_ENDS
    )


def _ignores_batch_logs(callback) -> bool:
    return (
        isinstance(callback, keras.callbacks.BackupAndRestore)
        or (isinstance(callback, FitHook) and not callback.reads_batch_logs)
        or (isinstance(callback, keras.callbacks.TensorBoard) and callback.update_freq == "epoch")
        or (isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq == "epoch")
    )


def _overrides(callback, name: str) -> bool:
    method = getattr(callback, name)
    return getattr(method, "__func__", method) is not getattr(keras.callbacks.Callback, name)


def _on_follower(callback):
    """What stands for a callback on a rank that does not write; None if nothing has to."""
    if type(callback) in WRITERS and not _reads_the_model(callback):
        return None
    silence(callback)
    return callback


def _reads_the_model(callback) -> bool:
    """Whether one of Keras' own writers takes a step that all ranks have to take with it."""
    return isinstance(callback, keras.callbacks.TensorBoard) and bool(
        # Weights that are split, as under ZeRO-3, are gathered where they are read.
        callback.embeddings_freq or callback.histogram_freq
    )


class _AgreeFirst(keras.callbacks.Callback):
    """Runs before the user's callbacks: what they read of the model is every rank's."""

    # Keras may then call the callbacks of a batch without waiting for it.
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
    """Runs after the user's callbacks: what they restored on the chief reaches every rank."""

    async_safe = True

    def __init__(self, strategy):
        super().__init__()
        self._strategy = strategy

    def on_epoch_end(self, epoch, logs=None):
        # A callback of the user's own may have looked at more than the logs.
        stop = tf.constant(bool(self.model.stop_training))
        stop = all_reduce(stop, self._strategy.group(), "max", name="stop-training")
        self.model.stop_training = bool(stop)

    def on_train_begin(self, logs=None):
        group = self._strategy.group()
        restoring.discard(self._strategy)
        broadcast_variables(self.model)
        # Keras' own place for what a callback restored: `fit` reads it right after this.
        self.model._initial_epoch = broadcast_object(
            self.model._initial_epoch, group, name="initial-epoch"
        )
