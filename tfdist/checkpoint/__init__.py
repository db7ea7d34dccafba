"""Checkpoints of global arrays: what one mesh has saved, any other can restore."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

#: Imported when somebody asks: launchers look at locks without TensorFlow.
_HOMES = {
    "CheckpointError": "errors",
    "Checkpointer": "checkpointer",
    "DirectoryInUseError": "errors",
    "Manifest": "manifest",
    "NewerFormatError": "errors",
    "OtherModelError": "errors",
    "Save": "saving",
    "StorageError": "errors",
    "begin_save": "saving",
    "latest": "directory",
    "restore": "restoring",
    "save": "saving",
    "young_daly": "intervals",
}

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


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"tfdist.checkpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
