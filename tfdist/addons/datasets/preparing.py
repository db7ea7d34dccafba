"""Prepares a dataset once, however many processes of a machine request it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING

from absl import logging

if TYPE_CHECKING:
    import tensorflow_datasets as tfds


def prepare(builder: tfds.core.DatasetBuilder) -> None:
    """Downloads and writes a dataset of any kind, unless it exists."""
    from tfdist.addons.datasets.digits import Digits

    if isinstance(builder, Digits):
        # It acquires the lock itself, and would wait for this process forever.
        builder.download_and_prepare()
    else:
        prepare_once(builder, builder.download_and_prepare)


def prepare_once(builder: tfds.core.DatasetBuilder, prepare: Callable[[], None]) -> None:
    """Prepares a dataset while other processes may prepare the same.

    TFDS writes into a temporary folder and renames it, which is atomic but fails if the folder
    exists by then; and it draws the temporary name from Python's `random`, so ranks with the same seed
    would write into the same folder. Hence the file lock, `.<name>.lock` in the `data_dir`, which also
    prevents ranks from downloading the same files; and the private random numbers while it is held.

    If standard error is not a terminal, TFDS' progress bars are disabled from here on, because a log
    would contain every state of them.

    Afterwards the builder's info is that of the prepared data.
    """
    if not (sys.stderr and sys.stderr.isatty()):
        import_tfds().disable_progress_bar()
    with _locked(os.fspath(builder.data_dir_root), builder.name), _private_random_numbers():
        try:
            prepare()
        except OSError:
            # A host without access to the lock was faster, and its data is equivalent.
            if not builder.is_prepared():
                raise
    # A builder that was created before the data has neither splits nor sizes.
    builder.info.read_from_directory(builder.data_dir)


def import_tfds() -> ModuleType:
    """The module `tensorflow_datasets`, an optional dependency.

    Raises:
        ImportError: It cannot be imported.
    """
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise ImportError(
            "Datasets require TensorFlow Datasets, which cannot be imported "
            f"({first_line(error)}). Run: pip install 'tfdist[data]'"
        ) from error
    return tensorflow_datasets


@contextlib.contextmanager
def _locked(data_dir: str, name: str) -> Iterator[None]:
    """Holds the lock of a dataset; continues without it where locks are not supported.

    A failure is written to the lock file for waiting processes: TFDS needs minutes to give up a download
    that cannot work, and each rank would try in turn.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(_lock_file(data_dir, name))
            waited = _lock(file, name, data_dir)
        except OSError as error:
            # A bucket, a read-only folder, or a network file system without locks.
            logging.info("%s in %s is prepared without a lock: %s", name, data_dir, error)
            yield
            return
        file.seek(0)
        if waited and (failure := file.read()):
            raise RuntimeError(f"another process could not prepare it: {failure}")
        file.truncate(0)
        try:
            yield
        except Exception as error:
            file.write(first_line(error))
            raise


def _lock_file(data_dir: str, name: str) -> IO[str]:
    if "://" in data_dir:
        raise OSError(errno.ENOLCK, "locks are not supported except in local folders", data_dir)
    Path(data_dir).mkdir(parents=True, exist_ok=True)
    return open(Path(data_dir, f".{name}.lock"), "a+", encoding="utf-8")


def _lock(file: IO[str], name: str, data_dir: str) -> bool:
    """Whether another process held the lock before this one got it."""
    # The kernel releases the lock when the file is closed or the process ends.
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logging.info("Waiting for another process that prepares %s in %s.", name, data_dir)
        fcntl.flock(file, fcntl.LOCK_EX)
        return True
    return False


@contextlib.contextmanager
def _private_random_numbers() -> Iterator[None]:
    """Uses a fresh state of `random` in its context, and restores the caller's."""
    state = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(state)


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip(' .:!')}" if lines else type(error).__name__
