"""Reading and deleting files of a local file system without trusting any of them.

Python's `open` follows links and blocks on pipes, and `shutil.rmtree` fails on a link to a folder. Here
each component of a path is checked, and opened relative to the one before.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from tfdist.checkpoint.errors import CorruptFileError, StorageError

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def read_file(root: str, name: str, limit: int) -> bytes | None:
    """The content of a regular file below a folder; None if there is none.

    The folder may be a link; nothing below it may be one.

    Raises:
        StorageError: It is not a regular file, has more than `limit` bytes, or cannot be read.
    """
    where = f"{root}/{name}"
    try:
        with _parent_of(root, name) as (folder, last):
            found = os.stat(last, dir_fd=folder, follow_symlinks=False)
            _check_kind(found.st_mode, stat.S_IFREG, where)
            # Nonblocking, because the file may be replaced by a pipe before it is opened.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            handle = os.open(last, flags, dir_fd=folder)
        with open(handle, "rb") as file:
            found = os.fstat(handle)
            _check_kind(found.st_mode, stat.S_IFREG, where)
            if found.st_size > limit:
                raise too_long(where, found.st_size, limit)
            return file.read(found.st_size)
    except FileNotFoundError:
        return None
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{where} cannot be read: {error.strerror or error}.") from error


def regular_size(root: str, name: str) -> int | None:
    """The size of a regular file below a folder in bytes; None if there is none."""
    try:
        with _parent_of(root, name) as (folder, last):
            found = os.stat(last, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def delete_tree(folder: str, first: str | None = None) -> None:
    """Deletes a folder with its content, the file `first` first; of a link only the link."""
    parent, name = os.path.split(folder)
    with _opened(parent or ".", _FOLDER) as above:
        _delete(name, above, first)


def too_long(where: str, size: int, limit: int) -> CorruptFileError:
    """The error of a file that has more bytes than any valid one."""
    return CorruptFileError(
        f"{where} is corrupt: expected at most {limit:,} bytes, found {size:,} bytes."
    )


def _delete(name: str, above: int, first: str | None = None) -> None:
    # Another process may delete the same.
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=above)
            return
        with _opened(name, _FOLDER | os.O_NOFOLLOW, above) as folder:
            # Listed at once, because a listing is not stable while entries are deleted.
            for each in sorted(os.listdir(folder), key=lambda found: found != first):
                _delete(each, folder)
        os.rmdir(name, dir_fd=above)


@contextlib.contextmanager
def _parent_of(root: str, name: str) -> Iterator[tuple[int, str]]:
    """The folder that contains a file, opened component by component, and the file's last name."""
    *above, last = name.split("/")
    with contextlib.ExitStack() as opened:
        folder = opened.enter_context(_opened(root, _FOLDER))
        for step in above:
            found = os.stat(step, dir_fd=folder, follow_symlinks=False)
            _check_kind(found.st_mode, stat.S_IFDIR, f"{root}/{name}", f"`{step}` in its path")
            folder = opened.enter_context(_opened(step, _FOLDER | os.O_NOFOLLOW, folder))
        yield folder, last


@contextlib.contextmanager
def _opened(path: str, flags: int, at: int | None = None) -> Iterator[int]:
    handle = os.open(path, flags, dir_fd=at)
    try:
        yield handle
    finally:
        os.close(handle)


def _check_kind(mode: int, expected: int, where: str, of: str = "") -> None:
    found = stat.S_IFMT(mode)
    if found != expected:
        kind = _KINDS.get(found, "something else")
        at = f" at {of}" if of else ""
        raise StorageError(f"{where} is corrupt: expected {_KINDS[expected]}{at}, found {kind}.")
