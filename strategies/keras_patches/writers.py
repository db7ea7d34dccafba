"""Callbacks that write, on ranks that do not: they take part in what needs all ranks, and write nothing.

Keras' own writers are left out there, since they only write what they are shown. One that somebody has
derived from them may do anything else as well, as call the model for a picture, which is work for all
ranks. It runs on every rank, and its files are in a temporary folder on all but the chief.
"""

from __future__ import annotations

import os
import tempfile

import keras
import tensorflow as tf

from tfdist.backend.keras.patching import Patch
from tfdist.step.context import strategy_of
from tfdist.strategies.keras_patches.saving import save_checkpoint
from tfdist.strategies.keras_patches.splits import receive_slices

WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
_FOLDER, _RESTORES = "_tfdist_folder", "_tfdist_restores"


def silence(callback) -> None:
    """Has a writer leave the user's files, and the network, alone; a second call does nothing.

    Bars are silent by `verbose=0`, which `fit` has on ranks other than the chief.

    Args:
        callback: Any callback. One that derives from none of `WRITERS` stays as it is.
    """
    if not isinstance(callback, WRITERS) or hasattr(callback, _FOLDER):
        return
    # It goes with the callback, or with the process.
    folder = tempfile.TemporaryDirectory(prefix="tfdist-silent-", ignore_cleanup_errors=True)
    setattr(callback, _FOLDER, folder)
    if isinstance(callback, keras.callbacks.CSVLogger):
        callback.filename = os.path.join(folder.name, "log.csv")
    if isinstance(callback, keras.callbacks.TensorBoard):
        callback.log_dir = folder.name
        # What needs no other rank, and takes time. The profiler is one for the process.
        callback.write_graph = callback._should_trace = False
        # Writers of its own, as for pictures, that were made with it.
        for name, value in list(vars(callback).items()):
            if isinstance(value, tf.summary.SummaryWriter):
                setattr(callback, name, tf.summary.create_file_writer(folder.name))


def _send(self, *args, original, **kwargs):
    """What `RemoteMonitor` shows it shows once, not once for each rank."""
    return None if hasattr(self, _FOLDER) else original(self, *args, **kwargs)


def note_restores(backup: keras.callbacks.BackupAndRestore, restores: bool) -> None:
    """Tells a backup, before the training begins, whether the chief is about to restore."""
    setattr(backup, _RESTORES, restores)


def _writes(callback) -> bool:
    """Whether a callback is on the rank that writes for all."""
    strategy = strategy_of(callback.model)
    return strategy is None or strategy.group().size == 1 or strategy.is_chief


def _restore(self, *args, original, **kwargs):
    """What the chief restores reaches this rank with its weights, slices of split ones here."""
    if _writes(self):
        original(self, *args, **kwargs)
    elif getattr(self, _RESTORES, False):
        receive_slices(self.model, self.model.distribute_strategy.group())


def _back_up(self, *args, original, **kwargs):
    """Other ranks than the chief take part in the save, and touch no file."""
    if _writes(self):
        save_checkpoint(self, *args, original=original, **kwargs)
    else:
        self.model.save_weights(filepath=self._weights_path, overwrite=True)


def _delete_backup(self, *args, original, **kwargs):
    return original(self, *args, **kwargs) if _writes(self) else None


_BACKUP = keras.callbacks.BackupAndRestore

PATCHES = (
    Patch(_BACKUP, "on_train_begin", ("self", "logs"), _restore),
    Patch(_BACKUP, "_save_model", ("self",), _back_up),
    Patch(_BACKUP, "on_train_end", ("self", "logs"), _delete_backup),
    Patch(
        keras.callbacks.ModelCheckpoint,
        "_save_model",
        ("self", "epoch", "batch", "logs"),
        save_checkpoint,
    ),
    Patch(keras.callbacks.RemoteMonitor, "on_epoch_end", ("self", "epoch", "logs"), _send),
)
