"""Callbacks that write files: only the chief writes, and other ranks take part in collectives.

Keras' own writers only run on the chief, since they only write logs. A class that is derived from them may also
do work that needs all ranks, such as calling the model for a picture. It runs on every rank, and its files are
in a temporary folder on all ranks but the chief.
"""

from __future__ import annotations

import os
import tempfile

import keras
import tensorflow as tf

from tfdist.backend.keras.patching import Patches
from tfdist.step.context import strategy_of
from tfdist.strategies.keras_patches.saving import save_checkpoint
from tfdist.strategies.keras_patches.splits import receive_slices

PATCHES = Patches()

WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_FOLDER, _RESTORES = "_tfdist_folder", "_tfdist_restores"


def silence(callback) -> None:
    """Redirects the files of a writer to a temporary folder; a second call does nothing.

    Progress bars are disabled by `verbose=0`, which `fit` sets on ranks other than the chief.

    Args:
        callback: Any callback. Classes that are not derived from `WRITERS` are not changed.
    """
    if not isinstance(callback, WRITERS) or hasattr(callback, _FOLDER):
        return
    # It is deleted together with the callback, or at the end of the process.
    folder = tempfile.TemporaryDirectory(prefix="tfdist-silent-", ignore_cleanup_errors=True)
    setattr(callback, _FOLDER, folder)
    if isinstance(callback, keras.callbacks.CSVLogger):
        callback.filename = os.path.join(folder.name, "log.csv")
    if isinstance(callback, keras.callbacks.TensorBoard):
        callback.log_dir = folder.name
        # They need no other rank, and cost time. There is one profiler per process.
        callback.write_graph = callback._should_trace = False
        # Custom writers, for example of pictures, that the callback has created.
        for name, value in list(vars(callback).items()):
            if isinstance(value, tf.summary.SummaryWriter):
                setattr(callback, name, tf.summary.create_file_writer(folder.name))


@PATCHES.of(keras.callbacks.RemoteMonitor, "on_epoch_end", "self", "epoch", "logs")
def _send(self, *args, original, **kwargs):
    """Sends the logs of a `RemoteMonitor` only from the chief."""
    return None if hasattr(self, _FOLDER) else original(self, *args, **kwargs)


def note_restores(backup: keras.callbacks.BackupAndRestore, restores: bool) -> None:
    """Records for a backup, before training begins, whether the chief will restore it."""
    setattr(backup, _RESTORES, restores)


def _writes(callback) -> bool:
    """Whether a callback is on the rank that writes files for all."""
    strategy = strategy_of(callback.model)
    return strategy is None or strategy.group().size == 1 or strategy.is_chief


@PATCHES.of(keras.callbacks.BackupAndRestore, "on_train_begin", "self", "logs")
def _restore(self, *args, original, **kwargs):
    """Restores a backup on the chief; other ranks receive their parts of split weights."""
    if _writes(self):
        original(self, *args, **kwargs)
    elif getattr(self, _RESTORES, False):
        receive_slices(self.model, self.model.distribute_strategy.group())


@PATCHES.of(keras.callbacks.BackupAndRestore, "_save_model")
def _back_up(self, *args, original, **kwargs):
    """Saves a backup on the chief; other ranks only take part in the collectives."""
    if _writes(self):
        save_checkpoint(self, *args, original=original, **kwargs)
    else:
        self.model.save_weights(filepath=self._weights_path, overwrite=True)


@PATCHES.of(keras.callbacks.BackupAndRestore, "on_train_end", "self", "logs")
def _delete_backup(self, *args, original, **kwargs):
    return original(self, *args, **kwargs) if _writes(self) else None
