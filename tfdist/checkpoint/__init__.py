"""Checkpoints of global arrays: what one mesh has saved, any other can restore."""

from tfdist.checkpoint.checkpointer import Checkpointer
from tfdist.checkpoint.intervals import young_daly
from tfdist.checkpoint.manifest import Manifest
from tfdist.checkpoint.restoring import OtherModelError, latest, restore
from tfdist.checkpoint.saving import Save, begin_save, save
from tfdist.checkpoint.storage import StorageError

__all__ = [
    "Checkpointer",
    "Manifest",
    "OtherModelError",
    "Save",
    "StorageError",
    "begin_save",
    "latest",
    "restore",
    "save",
    "young_daly",
]
