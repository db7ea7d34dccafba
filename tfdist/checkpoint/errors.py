"""What can be wrong with a checkpoint; each says it in one line."""

from __future__ import annotations

from tfdist.utils.errors import TfdistError


class CheckpointError(TfdistError):
    """A checkpoint cannot be written, or is not one for what it was to restore."""

    def __init__(self, message: str = ""):
        # Names of files and words of the system may have line feeds of their own.
        super().__init__(" ".join(str(message).split()))


class StorageError(CheckpointError, OSError):
    """Something cannot be read or written, or is damaged."""


class DirectoryInUseError(StorageError):
    """Another job saves into the directory."""


class NewerFormatError(CheckpointError, ValueError):
    """A newer tfdist wrote a checkpoint."""


class OtherModelError(CheckpointError, ValueError):
    """A checkpoint does not hold the arrays of the model."""
