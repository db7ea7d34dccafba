"""A lock on a directory that jobs save into: one at a time.

On a local file system the kernel holds the lock (`flock`) and lets it go when its holder dies, however
that happens. Over a network (NFS, Lustre, object stores) a lock of the kernel may be one host's own, or
there is none; there the holder renews a file every few seconds, and a file that nobody renewed for a
minute counts no more. Libraries of file locks know one of both ways, and none says who the holder is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import stat
import threading
import time
from typing import Any

import psutil

from tfdist.runtime.lock_owner import JOB, Owner
from tfdist.utils.errors import TfdistError

LOCK = "tfdist.lock"
_RENEW_SECONDS = 10.0
#: A holder that is about to end gets this long.
_PATIENCE_SECONDS = 2.0
_LOOK_SECONDS = 0.1
_OWNER_BYTES = 1 << 16
#: File systems of this machine alone: whoever can open a file there sees the same kernel's locks.
_LOCAL = frozenset(
    [
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "tmpfs",
        "ramfs",
        "overlay",
        "f2fs",
        "bcachefs",
        "jfs",
        "reiserfs",
        "apfs",
        "hfs",
    ]
)
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

#: The locks that this process holds, by directory, and how often it took each.
_held: dict[Any, tuple[Any, int]] = {}
_held_lock = threading.Lock()


class InUseError(TfdistError):
    """Another job holds the lock."""


class DirectoryLock:
    """The lock on a directory; a process may take it more than once.

    Args:
        directory: A folder, which is made where there is none; or an address of an object store.
    """

    def __init__(self, directory: str):
        self._directory = directory
        self._key: Any = None

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            InUseError: Another job holds it.
            OSError: The directory cannot be written to.
        """
        if self._key is not None:
            return
        with _held_lock:
            key = _key(self._directory)
            lock, count = _held.get(key, (None, 0))
            if lock is None:
                lock = _taken(self._directory)
            _held[key] = lock, count + 1
            self._key = key

    def check(self) -> None:
        """Raises InUseError where another job has taken the lock over."""
        with _held_lock:
            lock = _held[self._key][0] if self._key is not None else None
        if lock is not None:
            lock.check()

    def release(self) -> None:
        """Gives the lock back; once too often does nothing."""
        if self._key is None:
            return
        with _held_lock:
            lock, count = _held.pop(self._key)
            if count > 1:
                _held[self._key] = lock, count - 1
            else:
                lock.release()
            self._key = None


def holder_of(directory: str) -> Owner | None:
    """Who saves into a directory; None where nobody is known to. Takes nothing."""
    if "://" in directory:
        return None  # Asking takes as long as taking.
    path = os.path.join(directory, LOCK)
    content = _content(path)
    owner = None if content is None else Owner.parse(content)
    if owner is None or owner.is_gone() or (owner.job and owner.job == os.environ.get(JOB)):
        return None
    if not _is_local(directory):
        return owner
    try:
        handle = _opened(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return owner
    except OSError:
        return owner
    finally:
        os.close(handle)
    return None


def in_use(directory: str, owner: Owner | None) -> str:
    """What is said of a directory that another job holds."""
    who = "a process that has not said its name" if owner is None else owner.describe()
    return (
        f"Another job saves into {directory}: {who}. Give each job a directory of its own, or wait "
        f"until that one has ended."
    )


def _taken(directory: str):
    if "://" not in directory:
        os.makedirs(directory, exist_ok=True)
        if _is_local(directory):
            try:
                return _KernelLock(directory)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
    return _RenewedLock(directory)


def _key(directory: str):
    return directory if "://" in directory else os.path.realpath(directory)


class _KernelLock:
    """`flock` on a file, in which stands who holds it."""

    def __init__(self, directory: str):
        self._path = os.path.join(directory, LOCK)
        end = time.monotonic() + _PATIENCE_SECONDS
        while True:
            self._handle = _opened(self._path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Who held it has deleted it meanwhile: it is another file now.
                if _is_same(self._handle, self._path):
                    break
                os.close(self._handle)
            except BlockingIOError:
                os.close(self._handle)
                if time.monotonic() > end:
                    owner = Owner.parse(_content(self._path) or b"")
                    raise InUseError(in_use(directory, owner)) from None
                time.sleep(_LOOK_SECONDS)
            except BaseException:
                os.close(self._handle)
                raise
        _handles.add(self._handle)
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, Owner.here().content(), 0)
        except OSError:
            self.release()
            raise

    def check(self) -> None:
        """The kernel lets nobody take it over."""

    def release(self) -> None:
        """Deletes the file, and then lets it go."""
        with contextlib.suppress(OSError):
            if _is_same(self._handle, self._path):
                os.unlink(self._path)
        _handles.discard(self._handle)
        os.close(self._handle)


class _RenewedLock:
    """A file that a thread renews, where hosts share no kernel."""

    def __init__(self, directory: str):
        from tfdist.checkpoint.storage import Storage  # Imports TensorStore.

        self._directory, self._files = directory, Storage(directory)
        self._owner = Owner.here()
        self._lost: Owner | None = None
        end = time.monotonic() + _PATIENCE_SECONDS
        while not self._take():
            if time.monotonic() > end:
                content, _ = self._files.read_version(LOCK)
                raise InUseError(in_use(directory, Owner.parse(content or b"")))
            time.sleep(_LOOK_SECONDS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="tfdist-lock", daemon=True)
        self._thread.start()

    def _take(self) -> bool:
        content, version = self._files.read_version(LOCK)
        owner = None if content is None else Owner.parse(content)
        ours = owner is not None and owner.job and owner.job == self._owner.job
        if owner is not None and not ours and not owner.is_gone():
            return False
        taken = self._files.write_version(LOCK, self._owner.content(), version)
        self._version = taken or b""
        return taken is not None

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_SECONDS):
            owner = dataclasses.replace(self._owner, renewed=time.time())
            try:
                version = self._files.write_version(LOCK, owner.content(), self._version)
                if version is None:
                    content, _ = self._files.read_version(LOCK)
                    self._lost = Owner.parse(content or b"") or self._owner
                    return
            except OSError:
                continue  # The next time may do; a save that fails says why.
            self._version = version

    def check(self) -> None:
        """Raises InUseError where another job has taken it over."""
        if self._lost is not None:
            raise InUseError(in_use(self._directory, self._lost))

    def release(self) -> None:
        """Stops renewing, and deletes the file where it is still this process's."""
        self._ended.set()
        self._thread.join()
        if self._lost is None:
            with contextlib.suppress(OSError):
                self._files.write_version(LOCK, None, self._version)


#: Open handles of locks, which a forked child closes: it would keep a lock that its parent has lost.
_handles: set[int] = set()


def _close_handles() -> None:
    for handle in _handles:
        with contextlib.suppress(OSError):
            os.close(handle)
    _handles.clear()
    _held.clear()


os.register_at_fork(after_in_child=_close_handles)


def _opened(path: str, flags: int) -> int:
    """A regular file, opened; never a link's goal or a pipe."""
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no file", path)
    return handle


def _content(path: str) -> bytes | None:
    try:
        handle = _opened(path, os.O_RDONLY)
    except OSError:
        return None
    with open(handle, "rb") as file:
        return file.read(_OWNER_BYTES)


def _is_same(handle: int, path: str) -> bool:
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(handle))


def _is_local(directory: str) -> bool:
    """Whether all who can open the directory share this machine's kernel."""
    path = os.path.realpath(directory)
    best, kind = "", ""
    for each in psutil.disk_partitions(all=True):
        point = each.mountpoint.rstrip("/") + "/"
        if f"{path}/".startswith(point) and len(point) >= len(best):
            best, kind = point, each.fstype
    return kind.lower() in _LOCAL
