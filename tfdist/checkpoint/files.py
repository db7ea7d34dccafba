"""Reading and deleting files of a local file system, none of which is trusted.

Python's `open` follows links, waits for a writer where it finds a pipe, and `shutil.rmtree` takes a link
to a folder for an error; here each step of a path is looked at, and opened relative to the one before.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from tfdist.checkpoint.errors import StorageError

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def read_file(root: str, name: str, limit: int) -> bytes | None:
    """The content of a regular file below a folder; None where there is none.

    The folder may be a link; nothing below it may be one.

    Raises:
        StorageError: It is no regular file, has more bytes than `limit`, or cannot be read.
    """
    with _at(root, name) as (folder, last):
        if folder is None:
            return None
        try:
            found = os.stat(last, dir_fd=folder, follow_symlinks=False)
            _check_kind(found.st_mode, root, name)
            # Not waiting: what is a file now may be a pipe by the time it is opened.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            handle = os.open(last, flags, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(root, name, error) from error
    with open(handle, "rb", buffering=0):
        found = os.fstat(handle)
        _check_kind(found.st_mode, root, name)
        if found.st_size > limit:
            raise StorageError(
                f"{root}/{name} is damaged: it has {found.st_size:,} bytes, {limit:,} at most are "
                "right."
            )
        try:
            # One call reads all of a file, but where a signal comes or it has more than 2 GiB.
            content = os.read(handle, found.st_size)
            while len(content) < found.st_size and (
                more := os.read(handle, found.st_size - len(content))
            ):
                content += more
        except OSError as error:
            raise _unreadable(root, name, error) from error
    return content


def regular_size(root: str, name: str) -> int | None:
    """The bytes of a regular file below a folder; None where there is none."""
    try:
        with _at(root, name) as (folder, last):
            if folder is None:
                return None
            found = os.stat(last, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def delete_tree(folder: str, first: str | None = None) -> None:
    """Deletes a folder and all in it, the file `first` first; of a link, the link alone."""
    parent, name = os.path.split(folder)
    with _opened(parent or ".", _FOLDER) as above:
        _delete(name, above, first)


def _delete(name: str, above: int, first: str | None = None) -> None:
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=above)
            return
        with _opened(name, _FOLDER | os.O_NOFOLLOW, above) as folder:
            # Names alone: a list of a folder that is being emptied need not be whole.
            names = os.listdir(folder)
            for each in sorted(names, key=lambda found: found != first):
                _delete(each, folder)
        os.rmdir(name, dir_fd=above)
    except FileNotFoundError:  # Another has deleted it.
        return


@contextlib.contextmanager
def _at(root: str, name: str) -> Iterator[tuple[int | None, str]]:
    """The folder in which a file lies, opened step by step, and its last name."""
    *above, last = name.split("/")
    with contextlib.ExitStack() as opened:
        folder: int | None = None
        try:
            folder = opened.enter_context(_opened(root, _FOLDER))
            for step in above:
                found = os.stat(step, dir_fd=folder, follow_symlinks=False)
                if not stat.S_ISDIR(found.st_mode):
                    kind = _KINDS.get(stat.S_IFMT(found.st_mode), "a file")
                    raise StorageError(
                        f"{root}/{name} is damaged: `{step}` on the way to it is {kind}, and is to "
                        "be a folder."
                    )
                flags = _FOLDER | os.O_NOFOLLOW
                folder = opened.enter_context(_opened(step, flags, folder))
        except FileNotFoundError:
            folder = None
        except StorageError:
            raise
        except OSError as error:
            raise _unreadable(root, name, error) from error
        yield folder, last


@contextlib.contextmanager
def _opened(path: str, flags: int, at: int | None = None) -> Iterator[int]:
    handle = os.open(path, flags, dir_fd=at)
    try:
        yield handle
    finally:
        os.close(handle)


def _check_kind(mode: int, root: str, name: str) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise StorageError(f"{root}/{name} is damaged: it is {kind}, and is to be a file.")


def _unreadable(root: str, name: str, error: OSError) -> StorageError:
    return StorageError(f"{root}/{name} cannot be read: {error.strerror or error}.")
