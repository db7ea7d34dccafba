"""Checkpoints of global arrays: what one mesh has saved, any other can restore."""

from tfdist.checkpoint.checkpointer import Checkpointer
from tfdist.checkpoint.directory import latest
from tfdist.checkpoint.errors import (
    CheckpointError,
    DirectoryInUseError,
    NewerFormatError,
    OtherModelError,
    StorageError,
)
from tfdist.checkpoint.intervals import young_daly
from tfdist.checkpoint.manifest import Manifest
from tfdist.checkpoint.restoring import restore
from tfdist.checkpoint.saving import Save, begin_save, save

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "DirectoryInUseError",
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
