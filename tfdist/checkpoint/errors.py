"""Errors of checkpoints; the message of each is a single line."""

from __future__ import annotations

from tfdist.runtime import exit_codes, uncaught
from tfdist.utils.errors import TfdistError


class CheckpointError(TfdistError):
    """A checkpoint cannot be written, or cannot be restored into the given model."""

    def __init__(self, message: str = ""):
        # Names of files and messages of the system may contain line feeds.
        super().__init__(" ".join(str(message).split()))


class StorageError(CheckpointError, OSError):
    """A file cannot be read or written, or is corrupt."""


class CorruptFileError(StorageError):
    """The content of a file is not what was written."""


class DirectoryInUseError(StorageError):
    """Another job saves into the directory."""


class NewerFormatError(CheckpointError, ValueError):
    """A checkpoint was written by a newer version of tfdist."""


class OtherModelError(CheckpointError, ValueError):
    """The arrays of a checkpoint are not those of the model."""


def report_in_one_line() -> None:
    """Makes an uncaught `CheckpointError` end this process with one line and exit code 2.

    Only the user can fix a full disk, a directory in use or a different model: neither a traceback nor
    a restart helps.
    """
    uncaught.tell_in_one_line(CheckpointError, lambda error: exit_codes.USAGE)
