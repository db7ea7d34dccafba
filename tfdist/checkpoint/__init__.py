"""Checkpoints of global arrays: what one mesh has saved, any other can restore."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.checkpoint.checkpointer import Checkpointer
    from tfdist.checkpoint.directory import latest
    from tfdist.checkpoint.errors import CheckpointError
    from tfdist.checkpoint.restoring import restore
    from tfdist.checkpoint.saving import save

#: Imported when somebody asks: launchers look at locks without TensorFlow.
_HOMES = {
    "CheckpointError": "errors",
    "Checkpointer": "checkpointer",
    "latest": "directory",
    "restore": "restoring",
    "save": "saving",
}

__all__ = ["CheckpointError", "Checkpointer", "latest", "restore", "save"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"tfdist.checkpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
