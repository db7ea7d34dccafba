"""Checkpoints of named global arrays, which any mesh can restore."""

from typing import TYPE_CHECKING

from tfdist.utils.lazy import lazy_names

if TYPE_CHECKING:
    from tfdist.checkpoint.directory import latest as latest
    from tfdist.checkpoint.errors import CheckpointError as CheckpointError
    from tfdist.checkpoint.restoring import restore as restore
    from tfdist.checkpoint.saving import save as save

#: Imported on first use, because launchers inspect locks without importing TensorFlow.
_HOMES = {
    "CheckpointError": "tfdist.checkpoint.errors",
    "latest": "tfdist.checkpoint.directory",
    "restore": "tfdist.checkpoint.restoring",
    "save": "tfdist.checkpoint.saving",
}

__all__ = [*_HOMES]
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
