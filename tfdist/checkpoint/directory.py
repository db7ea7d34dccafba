"""A directory of checkpoints: which ones it contains, which is the newest, and which were lost."""

from __future__ import annotations

import os
import posixpath

from tfdist.checkpoint.errors import CorruptFileError, StorageError
from tfdist.checkpoint.manifest import step_of
from tfdist.checkpoint.storage import MANIFEST, UNFINISHED, Storage
from tfdist.runtime.directories import checked_directory, is_address

#: Records which checkpoint was completed last, so that its loss is detected.
_NEWEST = "newest.json"


def folders(directory: str) -> dict[str, bool]:
    """The folders of checkpoints in a directory, and whether each checkpoint is complete."""
    if is_address(directory):
        found: dict[str, bool] = {}
        for name in Storage(directory).names("step-"):
            folder, _, rest = name.partition("/")
            if rest and step_of(folder) is not None:
                found[folder] = found.get(folder, False) or rest == MANIFEST
        return found
    try:
        names = os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise StorageError(f"{directory} cannot be read: {error.strerror or error}.") from error
    return {
        name: os.path.lexists(os.path.join(directory, name, MANIFEST))
        for name in names
        if step_of(name) is not None
    }


def complete_checkpoints(directory: str) -> list[str]:
    """The folders of the complete checkpoints in a directory, the newest first."""
    found = [folder for folder, is_complete in folders(directory).items() if is_complete]
    return sorted(found, key=_order, reverse=True)


def latest(directory: str | os.PathLike) -> str | None:
    """The path of the newest complete checkpoint in a directory; None if there is none.

    Raises:
        StorageError: The directory cannot be read.
    """
    path = checked_directory(directory)
    newest = _newest_of_address(path) if is_address(path) else None
    found = [newest] if newest else complete_checkpoints(path)
    return posixpath.join(path, found[0]) if found else None


def _newest_of_address(directory: str) -> str | None:
    """The newest complete checkpoint by the record; None without one.

    A store would list the files of all checkpoints, a thousand in each request.
    """
    storage = Storage(directory)
    record = _readable_record(storage)
    complete = [name for name in record.values() if storage.names(f"{name}/{MANIFEST}")]
    is_known = record.get("folder") in complete and record.get("largest") in complete
    return max(complete, key=_order) if is_known else None


def _record(storage: Storage) -> dict[str, str]:
    """The record of a directory; empty without one.

    "folder" is the checkpoint that was completed last, "largest" that of the latest step so far, and "next" one that
    may be complete.
    """
    record = storage.read_json(_NEWEST)
    names = record.items() if isinstance(record, dict) else ()
    return {key: name for key, name in names if isinstance(name, str) and step_of(name) is not None}


def record_next(directory: str, folder: str) -> None:
    """Records which checkpoint will be completed next."""
    if is_address(directory):
        storage = Storage(directory)
        storage.write_json(_NEWEST, _readable_record(storage) | {"next": folder})


def record_newest(directory: str, folder: str) -> None:
    """Records which checkpoint was completed last."""
    storage = Storage(directory)
    record = {"folder": folder}
    if is_address(directory):
        earlier = _readable_record(storage)
        names = [earlier[key] for key in ("folder", "largest") if key in earlier]
        record["largest"] = max([folder, *names], key=_order)
    storage.write_json(_NEWEST, record)


def _readable_record(storage: Storage) -> dict[str, str]:
    """The record; empty if it is corrupt."""
    try:
        return _record(storage)
    except CorruptFileError:
        return {}


def lost(directory: str) -> list[str]:
    """Checkpoints that were complete and no longer are: a line for each."""
    found = folders(directory)
    best = max((_order(folder) for folder, complete in found.items() if complete), default=(-1, ""))
    lines: list[str] = []
    for folder in sorted(found, key=_order, reverse=True):
        if not found[folder] and _order(folder) > best and (why := _why(directory, folder)):
            lines.append(f"{directory}/{folder} is no longer a checkpoint: {why}.")
    try:
        newest = _record(Storage(directory)).get("folder")
    except StorageError as error:
        return [*lines, str(error)]
    if newest is not None and newest not in found:
        lines.append(f"{directory}/{newest}, the newest checkpoint, is missing.")
    return lines


def is_unfinished(storage: Storage) -> bool:
    """Whether a folder without a manifest is marked as one that never had one."""
    try:
        return storage.read(UNFINISHED) is not None
    except StorageError:
        return False


def is_folder(path: str) -> bool:
    """Whether a path is a folder and not a link to one; always true for addresses."""
    return is_address(path) or (os.path.isdir(path) and not os.path.islink(path))


def _why(directory: str, folder: str) -> str | None:
    """Why something with a checkpoint's name is not a checkpoint; None if it was never complete."""
    path = posixpath.join(directory, folder)
    if not is_address(path) and not os.path.isdir(path):
        return "it is a broken link" if os.path.islink(path) else "it is a file"
    return None if is_unfinished(Storage(path)) else f"{MANIFEST} is missing"


def _order(folder: str) -> tuple[int, str]:
    step = step_of(folder)
    return (-1 if step is None else step), folder
