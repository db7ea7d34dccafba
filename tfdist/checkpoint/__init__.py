"""Checkpoints of global arrays: what one mesh has saved, any other can restore."""

from tfdist.checkpoint.checkpointer import Checkpointer
from tfdist.checkpoint.intervals import young_daly
from tfdist.checkpoint.manifest import Manifest, NewerFormatError
from tfdist.checkpoint.restoring import OtherModelError, latest, restore
from tfdist.checkpoint.saving import Save, begin_save, save
from tfdist.checkpoint.storage import CheckpointError, StorageError

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Manifest",
    "NewerFormatError",
    "OtherModelError",
    "Save",
    "StorageError",
    "begin_save",
    "latest",
    "restore",
    "save",
    "young_daly",
]
