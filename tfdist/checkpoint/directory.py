"""A directory of checkpoints: which there are, which is the newest, and what is said to be missing."""

from __future__ import annotations

import os
import posixpath

from tfdist.checkpoint.errors import StorageError
from tfdist.checkpoint.manifest import step_of
from tfdist.checkpoint.storage import MANIFEST, UNFINISHED, Storage
from tfdist.runtime.directories import checked_directory, is_address

#: Says which checkpoint was completed last, so that its loss is told.
_NEWEST = "newest.json"


def folders(directory: str) -> dict[str, bool]:
    """The folders of checkpoints in a directory, and whether each is complete."""
    storage = Storage(directory)
    if not storage.is_local:
        found: dict[str, bool] = {}
        for name in storage.names("step-"):
            folder, _, rest = name.partition("/")
            if rest and step_of(folder) is not None:
                found[folder] = found.get(folder, False) or rest == MANIFEST
        return found
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        said = error.strerror or error
        raise StorageError(f"{directory} cannot be read: {said}.") from error
    return {
        name: os.path.lexists(os.path.join(directory, name, MANIFEST))
        for name in names
        if step_of(name) is not None
    }


def complete_checkpoints(directory: str) -> list[str]:
    """The folders in a directory whose checkpoints are complete, the newest first."""
    found = [folder for folder, whole in folders(directory).items() if whole]
    return sorted(found, key=_order, reverse=True)


def latest(directory: str | os.PathLike) -> str | None:
    """The path of the newest complete checkpoint in a directory; None where there is none.

    Raises:
        StorageError: The directory cannot be read.
    """
    path = checked_directory(directory)
    found = complete_checkpoints(path)
    return posixpath.join(path, found[0]) if found else None


def record_newest(directory: str, folder: str) -> None:
    """Notes which checkpoint was completed last."""
    Storage(directory).write_json(_NEWEST, {"folder": folder})


def lost(directory: str) -> list[str]:
    """What is missing of the checkpoints in a directory: a line for each that was complete once."""
    found = folders(directory)
    storage = Storage(directory)
    complete = [folder for folder, whole in found.items() if whole]
    best = max(map(_order, complete), default=(-1, ""))
    said: list[str] = []
    for folder in sorted(found, key=_order, reverse=True):
        if not found[folder] and _order(folder) > best and (why := _why(directory, folder)):
            said.append(f"{directory}/{folder} is no checkpoint any more: {why}.")
    try:
        record = storage.read_json(_NEWEST)
    except StorageError as error:
        return [*said, str(error)]
    newest = record.get("folder") if isinstance(record, dict) else None
    if isinstance(newest, str) and step_of(newest) is not None and newest not in found:
        said.append(f"{directory}/{newest}, the newest checkpoint, is not there any more.")
    return said


def is_unfinished(storage: Storage) -> bool:
    """Whether a folder without a manifest says that it never had one."""
    try:
        return storage.read(UNFINISHED) is not None
    except StorageError:
        return False


def is_folder(path: str) -> bool:
    """Whether something is a folder itself, and no link to one; all addresses are."""
    return is_address(path) or (os.path.isdir(path) and not os.path.islink(path))


def _why(directory: str, folder: str) -> str | None:
    """Why something with a checkpoint's name is none; None where it was never complete."""
    path = posixpath.join(directory, folder)
    if not is_address(path) and not os.path.isdir(path):
        return "it is a link to nothing" if os.path.islink(path) else "it is a file"
    return None if is_unfinished(Storage(path)) else f"it has no {MANIFEST}"


def _order(folder: str) -> tuple[int, str]:
    step = step_of(folder)
    return (-1 if step is None else step), folder
