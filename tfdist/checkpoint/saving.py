"""Saves a model's training state: every rank writes its part, and the chief the manifest."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import posixpath
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.checkpoint.chunks import (
    CHUNK_BYTES,
    CRC_BYTES,
    check_equal,
    chunk_keys,
    chunk_shape_of,
    decode,
    folder_of_array,
)
from tfdist.checkpoint.directory import record_newest, record_next
from tfdist.checkpoint.directory_lock import DirectoryLock, check_lock
from tfdist.checkpoint.entries import entries_of, gather_arrays
from tfdist.checkpoint.errors import CheckpointError, StorageError
from tfdist.checkpoint.manifest import Array, Digests, Manifest, folder_of, keys_of
from tfdist.checkpoint.regrouping import Regrouping
from tfdist.checkpoint.shards import Entry
from tfdist.checkpoint.storage import UNFINISHED, Storage, digest_of
from tfdist.collectives import Group
from tfdist.collectives.local import LocalEngine
from tfdist.collectives.objects import all_gather_object, broadcast_object
from tfdist.runtime.directories import checked_directory
from tfdist.sharding.kept import KeptState
from tfdist.sharding.states import average_accumulated
from tfdist.step.local_steps import local_optimizer
from tfdist.utils import checks

#: How long ranks wait for the parts of others.
_PARTS_SECONDS = 1800.0
_POLL_SECONDS = 0.02


def save(
    directory: str | os.PathLike,
    model: keras.Model,
    *,
    step: int,
    state: dict[str, Any] | None = None,
) -> str:
    """Saves a model and its optimizer; all ranks must call it.

    Args:
        directory: A folder that all ranks share, or an address of an object store that TensorStore
            supports (`gs://`, `s3://`). The checkpoint becomes a folder in it.
        model: The model.
        step: The number of the training step, which becomes a part of the folder's name.
        state: Other state to save, JSON-serializable.

    Returns:
        The checkpoint's path.

    Raises:
        DirectoryInUseError: Another job saves into the directory; on all ranks.
        StorageError: The checkpoint cannot be written; on all ranks.
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of range.
    """
    path = checked_directory(directory)
    checks.integer("step", step, minimum=0)
    _check_state(state)
    checks.instance("model", model, keras.Model, "a Keras model")
    saver = Saver(path, model)
    with contextlib.ExitStack() as ending:
        ending.callback(lock_on(path, saver.world).release)
        writing = saver.begin(step, state)
        ending.callback(writing.give_up)
        return writing.wait()


def lock_on(directory: str, world: Group) -> DirectoryLock:
    """The lock on a directory, which the chief acquires; all ranks must call it.

    Raises:
        DirectoryInUseError: Another job holds it; on all ranks.
        StorageError: The directory is not writable; on all ranks.
    """
    lock = DirectoryLock(directory)

    def acquire() -> None:
        try:
            lock.acquire()
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(
                f"Could not write to {directory}: {error.strerror or error}."
            ) from error

    run_on_chief(acquire, world, "lock")
    return lock


def run_on_chief(function: Callable[[], Any], world: Group, name: str) -> Any:
    """Calls a function on the chief, and returns its result on all ranks, which must all call this.

    Raises:
        CheckpointError: The function raised it; on all ranks.
    """
    found: Any = None
    if world.rank == 0:
        try:
            found = function()
        except CheckpointError as error:
            found = error
    found = broadcast_object(found, world, name=f"checkpoint/{name}")
    if isinstance(found, CheckpointError):
        raise found
    return found


class Saver:
    """Saves a model repeatedly; ranks agree on the arrays only once.

    Attributes:
        world: All ranks.
        parts: What this rank writes.
        writers: The ranks that write each array, by name.
    """

    def __init__(
        self, directory: str, model: keras.Model, states: Sequence[KeptState] | None = None
    ):
        self._directory, self._model = directory, model
        self.world = world_of(model)
        self._token = broadcast_object(secrets.token_hex(4), self.world, name="checkpoint")
        self.parts = Regrouping(entries_of(model, states=states))
        self._arrays, self.writers = gather_arrays(self.parts.entries, self.world)

    def begin(
        self,
        step: int,
        state: dict[str, Any] | None = None,
        on_complete: Callable[[str], None] = lambda path: None,
    ) -> Save:
        """Copies this rank's parts, and writes them in a thread.

        Args:
            step: The number of the training step.
            state: Other state to save.
            on_complete: Called on the chief, in that thread, with the path of the complete
                checkpoint. `Save.wait` raises its errors on all ranks.
        """
        local = local_optimizer(self._model)
        if local is not None:
            local.note_parameters()
        average_accumulated(self._model)
        path = posixpath.join(self._directory, folder_of(step, self._token))
        manifest = Manifest(step, self._arrays, _check_state(state), {})
        return Save(self, path, manifest, on_complete)


def world_of(model: keras.Model) -> Group:
    """All ranks of the model's strategy; only this process without a strategy of tfdist."""
    strategy: Any = model.distribute_strategy
    return strategy.group() if hasattr(strategy, "engine") else LocalEngine().group()


class Save:
    """A checkpoint that is being written.

    Attributes:
        path: Its path.
        seconds: The time that this rank's writing took, available at the end.
    """

    seconds = 0.0
    _is_complete = False

    def __init__(
        self, saver: Saver, path: str, manifest: Manifest, on_complete: Callable[[str], None]
    ):
        self.path = path
        self._manifest, self._on_complete = manifest, on_complete
        self._world, self._writers = saver.world, saver.writers
        self._own = self._world.ranks[self._world.rank]
        # Copies, because training changes the variables in the meantime.
        self._values: list[tuple[Entry, np.ndarray]] = list(saver.parts.values())
        self._error: str | None = None
        self._written, self._digested = threading.Event(), threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> str:
        """Returns the path when the checkpoint is complete; all ranks must call it.

        Raises:
            StorageError: It could not be written; on all ranks. Files written so far are deleted.
        """
        # In stages, so that no rank waits for parts or digests of a rank that has failed.
        for stage, wait in (
            ("written", self._written.wait),
            ("digested", self._digested.wait),
            ("completed", self._thread.join),
        ):
            wait()
            errors = all_gather_object(self._error, self._world, name=f"checkpoint/{stage}")
            for rank, error in zip(self._world.ranks, errors, strict=True):
                if error:
                    self.give_up()
                    self._clear()
                    raise StorageError(f"Rank {rank} could not save: {error}")
        return self.path

    def give_up(self) -> None:
        """Ends a save that some ranks will not wait for; returns when writing has ended."""
        self._given_up.set()
        self._thread.join()

    def _clear(self) -> None:
        """Deletes the files of a failed save, once no rank writes any more."""
        all_gather_object(None, self._world, name="checkpoint/given-up")
        if self._world.rank == 0 and not self._is_complete:
            # Else the next start deletes them; the user must see why the save has failed.
            with contextlib.suppress(StorageError):
                Storage(self.path).delete()

    def _run(self) -> None:
        begun = time.perf_counter()
        try:
            storage = Storage(self.path)
            if self._world.rank == 0:
                storage.write_json(UNFINISHED, {})
            digests = self._write(storage)
            self._written.set()
            digests |= self._digest_shared(storage)
            storage.write_json(f"digests/{self._own}", digests)
            self._digested.set()
            if self._world.rank == 0:
                self._finish(storage)
        except StorageError as error:
            self._error = str(error)
        except Exception as error:  # Raised again by `wait`, on all ranks.
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._written.set()
            self._digested.set()
            self.seconds = time.perf_counter() - begun

    def _write(self, storage: Storage) -> Digests:
        """Writes this rank's parts; returns the digests of the arrays that only this rank writes."""
        digests: Digests = {}
        while self._values:
            entry, value = self._values.pop()
            parts = [(shard.box, shard.get(value)) for shard in entry.shards]
            storage.write(storage.create(entry.name, *entry.array), parts)
            if self._writers[entry.name] == (self._own,):
                is_whole = len(parts) == 1 and parts[0][1].shape == entry.shape
                whole = parts[0][1] if is_whole else None
                digests |= read_back(storage, entry.name, entry.array, whole)
                del whole
            del value, parts  # Freed before the next value is split.
        storage.write_json(f"parts/{self._own}", {})
        return digests

    def _digest_shared(self, storage: Storage) -> Digests:
        """The digests of this rank's share of the files that several ranks write."""
        shared = {
            name: ranks
            for name, ranks in self._writers.items()
            if len(ranks) > 1 and self._own in ranks
        }
        digests: Digests = {}
        if self._wait_for(storage, "parts", {rank for ranks in shared.values() for rank in ranks}):
            for name, ranks in shared.items():
                array, place = self._manifest.arrays[name], ranks.index(self._own)
                digests |= read_back(storage, name, array, place=place, count=len(ranks))
        return digests

    def _wait_for(self, storage: Storage, kind: str, ranks: set[int]) -> bool:
        """Waits for a file of each of some ranks; returns whether all exist."""
        end, missing = time.monotonic() + _PARTS_SECONDS, ranks - {self._own}
        while missing and not self._given_up.is_set():
            # A list, because a store has a request for each file, and there may be thousands.
            found = set(storage.names(f"{kind}/"))
            missing = {rank for rank in missing if f"{kind}/{rank}" not in found}
            if missing and time.monotonic() > end:
                raise StorageError(
                    f"{self.path} is not complete: the parts of ranks {sorted(missing)} did not arrive "
                    f"within {_PARTS_SECONDS:.0f} s. Check that all ranks share this folder."
                )
            if missing:
                time.sleep(_POLL_SECONDS)
        return not missing

    def _finish(self, storage: Storage) -> None:
        """Writes the manifest when all parts were written and read back."""
        if not self._wait_for(storage, "digests", set(self._world.ranks)):
            return
        digests: Digests = {}
        for rank in self._world.ranks:
            digests |= storage.read_json(f"digests/{rank}")
        wanted = {
            key
            for name, array in self._manifest.arrays.items()
            for key in keys_of(name, array, self._manifest.chunk_of(name))
        }
        if missing := sorted(wanted - digests.keys()):
            raise StorageError(
                f"{self.path} is not complete: no rank has written {', '.join(missing[:3])}."
            )
        directory, _, folder = self.path.rpartition("/")
        check_lock(directory)
        record_next(directory, folder)
        dataclasses.replace(self._manifest, files=digests).write(storage)
        self._is_complete = True
        for kind in ("parts", "digests"):
            storage.delete_below(kind)
        storage.delete_file(UNFINISHED)
        record_newest(directory, folder)
        self._on_complete(self.path)


def read_back(
    storage: Storage,
    name: str,
    array: Array,
    value: np.ndarray | None = None,
    *,
    place: int = 0,
    count: int = 1,
) -> Digests:
    """Reads back files of an array, each `count`th beginning with `place`: their sizes and digests.

    A bad write is thus detected before the manifest is written.

    Args:
        storage: The checkpoint's files.
        name: The array's name.
        array: Its shape and dtype.
        value: The whole array, which the files are compared with. If None, only the checksums are
            verified.
        place: The first file.
        count: The step from one file to the next.

    Raises:
        StorageError: A file is missing or corrupt.
    """
    shape, dtype = array
    chunk = chunk_shape_of(shape, dtype)
    folder = folder_of_array(name)
    keys = [(None, "zarr.json"), *chunk_keys(shape, chunk)]
    found: Digests = {}
    for at, key in itertools.islice(keys, place, None, count):
        path = f"{folder}/{key}"
        content = storage.read(path, CHUNK_BYTES + CRC_BYTES)
        if content is None:
            raise StorageError(f"{storage.path}/{path} is missing after it was written.")
        if at is not None:
            try:
                numbers = decode(content, chunk, dtype, checks=value is None)
                if value is not None:
                    check_equal(numbers, at, value)
            except StorageError as error:
                raise StorageError(
                    f"{storage.path}/{path} is corrupt after it was written: {error}."
                ) from error
        found[path] = (len(content), digest_of(content))
    return found


def _check_state(state: Any) -> dict[str, Any]:
    """A copy of a state as reading will return it; raises if it is not JSON-serializable."""
    if state is None:
        return {}
    if not isinstance(state, dict):
        raise TypeError(
            f"`state` must be a JSON-serializable dict. Received: {checks.shown(state)}."
        )
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise type(error)(f"`state` must be a JSON-serializable dict: {error}.") from error
