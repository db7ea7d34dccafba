"""A lock on a directory of checkpoints, so that one job at a time saves into it.

On a local file system the kernel holds the lock (`flock`) and releases it when the holder exits for any
reason. On network file systems (NFS, Lustre) and object stores, kernel locks may be local to one host or
not available. There the holder renews a file every few seconds, and a file that was not renewed for a
minute is ignored. Lock libraries implement only one of the two, and do not report the holder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import stat
import threading
import time

import psutil

from tfdist.checkpoint.errors import DirectoryInUseError
from tfdist.runtime.lock_owner import JOB, STALE_SECONDS, Owner

_logger = logging.getLogger("tfdist")
LOCK = "tfdist.lock"
_RENEW_SECONDS = 10.0
#: How long to wait for a holder that is about to exit.
_PATIENCE_SECONDS = 2.0
_POLL_SECONDS = 0.1
_OWNER_BYTES = 1 << 16
#: File systems that only this machine mounts, so all processes share one kernel's locks.
_LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "reiserfs"}
    | {"apfs", "hfs", "overlay", "ramfs", "tmpfs"}
)
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class DirectoryLock:
    """The lock on a directory. It is reentrant within a process.

    Args:
        directory: A folder, created if needed, or an address of an object store.
    """

    def __init__(self, directory: str):
        self._directory = directory
        self._key: str | None = None

    def acquire(self) -> None:
        """Acquires the lock.

        Raises:
            DirectoryInUseError: Another job holds it.
            OSError: The directory is not writable.
        """
        if self._key is not None:
            return
        with _held_lock:
            key = _key_of(self._directory)
            lock, count = _held.get(key) or (_acquired(self._directory), 0)
            _held[key] = lock, count + 1
            self._key = key

    def release(self) -> None:
        """Releases the lock; does nothing if it is not held."""
        if self._key is None:
            return
        with _held_lock:
            lock, count = _held.pop(self._key)
            if count > 1:
                _held[self._key] = lock, count - 1
            else:
                lock.release()
            self._key = None


def check_lock(directory: str) -> None:
    """Raises DirectoryInUseError if another job has taken over the lock that this process held."""
    held = _held.get(_key_of(directory))
    if held is not None:
        held[0].check()


def _key_of(directory: str) -> str:
    return directory if "://" in directory else os.path.realpath(directory)


def holder_of(directory: str) -> Owner | None:
    """The job that saves into a directory; None if there is none, or only `DirectoryLock.acquire` can tell."""
    if "://" in directory:
        return None  # A query costs as much as an attempt to acquire.
    path = os.path.join(directory, LOCK)
    owner = _owner_in(path)
    if owner is None or owner.is_gone() or (owner.job and owner.job == os.environ.get(JOB)):
        return None
    if not _is_local(directory):
        return owner if owner.is_here() else None
    try:
        with open(_opened(path, os.O_RDONLY), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except OSError:
        return owner
    return None


def in_use(directory: str, owner: Owner | None) -> str:
    """The message for a directory that another job holds."""
    who = "an unidentified process" if owner is None else owner.describe()
    return (
        f"Another job saves into {directory}: {who}. Use a separate directory for each job, or wait "
        "until that job has ended."
    )


def _acquired(directory: str) -> _KernelLock | _RenewedLock:
    if "://" not in directory:
        os.makedirs(directory, exist_ok=True)
        if _is_local(directory):
            try:
                return _wait_for(_KernelLock(directory), directory, outlives_holder=False)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
    return _wait_for(_RenewedLock(directory), directory, outlives_holder=True)


def _wait_for(lock, directory: str, *, outlives_holder: bool):
    """Acquires a lock, and returns it.

    A holder elsewhere that renews its lock meanwhile is alive; else its lock becomes stale.
    """
    end, first = time.monotonic() + _PATIENCE_SECONDS, lock.owner()
    while not lock.try_acquire():
        if time.monotonic() > end:
            owner = lock.owner()
            if owner is None or owner != first or owner.is_here() or not outlives_holder:
                raise DirectoryInUseError(in_use(directory, owner))
            if end:
                text = "%s is locked by %s. Waiting for up to %.0f s, in case it has died."
                _logger.warning(text, directory, owner.describe(), STALE_SECONDS)
                end = 0.0  # Reported once.
        time.sleep(_POLL_SECONDS)
    return lock


class _KernelLock:
    """`flock` on a file that contains the owner."""

    def __init__(self, directory: str):
        self._path = os.path.join(directory, LOCK)

    def owner(self) -> Owner | None:
        return _owner_in(self._path)

    def try_acquire(self) -> bool:
        with contextlib.ExitStack() as undo:
            self.handle = _opened(self._path, os.O_RDWR | os.O_CREAT)
            undo.callback(os.close, self.handle)
            try:
                fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            # The previous holder may have deleted the file after it was opened here.
            if not _is_same(self.handle, self._path):
                return False
            undo.pop_all()
            undo.callback(self.release)
            os.ftruncate(self.handle, 0)
            os.pwrite(self.handle, Owner.here().content(), 0)
            undo.pop_all()
        return True

    def check(self) -> None:
        """Does nothing: the kernel does not let another process take over the lock."""

    def release(self) -> None:
        # Deleted before it is unlocked, so that no other process can hold the deleted file.
        with contextlib.suppress(OSError):
            if _is_same(self.handle, self._path):
                os.unlink(self._path)
        os.close(self.handle)


class _RenewedLock:
    """A file that a thread renews, for directories that hosts with different kernels share."""

    def __init__(self, directory: str):
        from tfdist.checkpoint.storage import Storage  # Imports TensorStore.

        self._directory, self._files = directory, Storage(directory)
        self._here = Owner.here()
        self._lost: Owner | None = None
        self._version = b""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="tfdist-lock", daemon=True)

    def owner(self) -> Owner | None:
        content, _ = self._files.read_version(LOCK)
        return Owner.parse(content or b"")

    def try_acquire(self) -> bool:
        content, version = self._files.read_version(LOCK)
        owner = Owner.parse(content or b"")
        if owner is not None and self._is_own(owner):
            return self._acquired(version)
        is_ours = owner is not None and owner.job and owner.job == self._here.job
        if owner is not None and not is_ours and not owner.is_gone():
            return False
        written = self._files.write_version(LOCK, self._here.content(), version)
        return written is not None and self._acquired(written)

    def _acquired(self, version: bytes) -> bool:
        self._version = version
        self._thread.start()
        return True

    def _is_own(self, owner: Owner) -> bool:
        """Whether this lock wrote the owner: a store may write and lose its answer."""
        return dataclasses.replace(owner, renewed=self._here.renewed) == self._here

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_SECONDS):
            renewed = dataclasses.replace(self._here, renewed=time.time())
            # An error may be temporary; a save that fails reports it.
            with contextlib.suppress(OSError):
                version = self._files.write_version(LOCK, renewed.content(), self._version)
                if version is None:
                    content, version = self._files.read_version(LOCK)
                    owner = Owner.parse(content or b"")
                    if owner is None or not self._is_own(owner):
                        self._lost = owner or self._here
                        return
                self._version = version

    def check(self) -> None:
        # Read, because a process that was suspended does not know yet.
        owner = self.owner()
        if owner is None or not self._is_own(owner):
            raise DirectoryInUseError(in_use(self._directory, owner or self._here))

    def release(self) -> None:
        self._ended.set()
        self._thread.join()
        if self._lost is None:
            with contextlib.suppress(OSError):
                self._files.write_version(LOCK, None, self._version)


#: The locks that this process holds, by directory, and how many times each was acquired.
_held: dict[str, tuple[_KernelLock | _RenewedLock, int]] = {}
_held_lock = threading.Lock()


def _forget_locks() -> None:
    """In a forked child: closes handles, which would keep a lock that the parent has lost."""
    for lock, _ in _held.values():
        if isinstance(lock, _KernelLock):
            with contextlib.suppress(OSError):
                os.close(lock.handle)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def _opened(path: str, flags: int) -> int:
    """Opens a regular file, without following a link."""
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", path)
    return handle


def _owner_in(path: str) -> Owner | None:
    try:
        with open(_opened(path, os.O_RDONLY), "rb") as file:
            return Owner.parse(file.read(_OWNER_BYTES))
    except OSError:
        return None


def _is_same(handle: int, path: str) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False


def _is_local(directory: str) -> bool:
    """Whether all processes that can open the directory share this machine's kernel."""
    path = f"{os.path.realpath(directory)}/"
    mounted = psutil.disk_partitions(all=True)
    kinds = {f"{each.mountpoint.rstrip('/')}/": each.fstype for each in mounted}
    point = max(filter(path.startswith, kinds), key=len, default="")
    return kinds.get(point, "").lower() in _LOCAL
