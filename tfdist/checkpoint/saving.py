"""Saves a model's training state: every rank writes its part, the chief the manifest."""

from __future__ import annotations

import dataclasses
import json
import os
import posixpath
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.backend.keras.attributes import stored_value
from tfdist.checkpoint.chunks import chunk_shape_of
from tfdist.checkpoint.digests import read_back
from tfdist.checkpoint.directory import record_newest
from tfdist.checkpoint.directory_lock import DirectoryLock, InUseError
from tfdist.checkpoint.entries import entries_of, held_by
from tfdist.checkpoint.errors import DirectoryInUseError, StorageError
from tfdist.checkpoint.manifest import Digests, Manifest, folder_of, keys_of
from tfdist.checkpoint.shards import Entry
from tfdist.checkpoint.storage import UNFINISHED, Storage
from tfdist.collectives import Group
from tfdist.collectives.local import LocalEngine
from tfdist.collectives.objects import all_gather_object, broadcast_object
from tfdist.runtime.directories import checked_directory
from tfdist.sharding.kept import KeptState
from tfdist.step.local_steps import local_optimizer
from tfdist.utils import checks

#: How long ranks wait for the parts of others.
_PARTS_SECONDS = 1800.0
_LOOK_SECONDS = 0.02


def save(
    directory: str | os.PathLike,
    model: keras.Model,
    *,
    step: int,
    state: dict[str, Any] | None = None,
) -> str:
    """Saves a model and its optimizer; all ranks call it.

    Args:
        directory: A folder that all ranks reach, or an address of an object store that TensorStore
            knows (`gs://`, `s3://`). The checkpoint becomes a folder in it.
        model: The model.
        step: The number of the training step, for the folder's name.
        state: What else is to be kept: anything that JSON can hold.

    Returns:
        The checkpoint's path.

    Raises:
        DirectoryInUseError: Another job saves into the directory; on all ranks.
        StorageError: It cannot be written; on all ranks.
        TypeError: An argument has another type.
        ValueError: An argument is out of its range.
    """
    return begin_save(directory, model, step=step, state=state).wait()


def begin_save(
    directory: str | os.PathLike,
    model: keras.Model,
    *,
    step: int,
    state: dict[str, Any] | None = None,
) -> Save:
    """As `save`, but writing goes on in a thread; training may go on meanwhile."""
    path = checked_directory(directory)
    checks.integer("step", step, minimum=0)
    _check_state(state)
    checks.instance("model", model, keras.Model, "a Keras model")
    saver = Saver(path, model)
    lock = lock_on(path, saver.world)
    try:
        return saver.begin(step, state, on_end=lock.release)
    except BaseException:
        lock.release()
        raise


def lock_on(directory: str, world: Group) -> DirectoryLock:
    """The lock on a directory, which the chief takes; all ranks call it.

    Raises:
        DirectoryInUseError: Another job holds it; on all ranks.
        StorageError: The directory cannot be written to; on all ranks.
    """
    lock = DirectoryLock(directory)
    error: StorageError | None = None
    if world.rank == 0:
        try:
            lock.acquire()
        except InUseError as in_use:
            error = DirectoryInUseError(str(in_use))
        except StorageError as refused:
            error = refused
        except OSError as refused:
            said = refused.strerror or refused
            error = StorageError(f"{directory}: cannot write: {said}.")
    error = broadcast_object(error, world, name="checkpoint/lock")
    if error is not None:
        raise error
    return lock


class Saver:
    """Saves a model again and again; what stays the same the ranks agree on once."""

    def __init__(
        self, directory: str, model: keras.Model, states: Sequence[KeptState] | None = None
    ):
        self._directory, self._model = directory, model
        self.world = world_of(model)
        self._token = broadcast_object(secrets.token_hex(4), self.world, name="checkpoint")
        self._entries = entries_of(model, states=states)
        self._arrays, self._writers = held_by(self._entries, self.world)

    def begin(
        self,
        step: int,
        state: dict[str, Any] | None = None,
        on_complete: Callable[[str], None] = lambda path: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> Save:
        """Copies this rank's parts, and writes them in a thread.

        Args:
            step: The number of the training step.
            state: What else is to be kept.
            on_complete: Called on the chief, in that thread, with the path of the complete
                checkpoint. What it raises, `Save.wait` raises on all ranks.
            on_end: Called when nothing more is written, well or not.
        """
        local = local_optimizer(self._model)
        if local is not None:
            local.note_parameters()
        path = posixpath.join(self._directory, folder_of(step, self._token))
        manifest = Manifest(step, self._arrays, _check_state(state), {})
        return Save(path, self._entries, manifest, self._writers, self.world, on_complete, on_end)


def world_of(model: keras.Model) -> Group:
    """All ranks of the model's strategy; this process alone where it has none of tfdist's."""
    strategy: Any = model.distribute_strategy
    return strategy.group() if hasattr(strategy, "engine") else LocalEngine().group()


class Save:
    """A checkpoint that is being written.

    Attributes:
        path: Where.
        seconds: How long this rank's writing took, once it is done.
    """

    seconds = 0.0
    _is_complete = False

    def __init__(
        self,
        path: str,
        entries: Sequence[Entry],
        manifest: Manifest,
        writers: Mapping[str, tuple[int, ...]],
        world: Group,
        on_complete: Callable[[str], None],
        on_end: Callable[[], None],
    ):
        self.path = path
        self._manifest, self._writers, self._world = manifest, writers, world
        self._on_complete, self._on_end = on_complete, on_end
        # Copies: what is trained on meanwhile does not reach them.
        self._values: list[tuple[Entry, np.ndarray]] = [
            (entry, stored_value(entry.variable).numpy()) for entry in entries if entry.writes
        ]
        self._error: str | None = None
        self._written, self._digested = threading.Event(), threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> str:
        """Returns the path when the checkpoint is complete; all ranks call it.

        Raises:
            StorageError: It could not be written; on all ranks. What was written is deleted.
        """
        # Step by step: no rank need wait for a part of another, or for its digests, that will not
        # come.
        self._written.wait()
        self._raise_any("written")
        self._digested.wait()
        self._raise_any("digested")
        self._thread.join()
        self._raise_any("completed")
        return self.path

    def give_up(self) -> None:
        """Ends a save that not all ranks will wait for; returns when nothing more is written."""
        self._given_up.set()
        self._thread.join()

    def _raise_any(self, stage: str) -> None:
        errors = all_gather_object(self._error, self._world, name=f"checkpoint/{stage}")
        for rank, error in zip(self._world.ranks, errors, strict=True):
            if error:
                self._given_up.set()
                self._thread.join()
                self._clear()
                raise StorageError(f"Rank {rank} could not save: {error}")

    def _clear(self) -> None:
        """Deletes what a failed save has left, once no rank writes any more."""
        all_gather_object(None, self._world, name="checkpoint/given-up")
        if self._world.rank == 0 and not self._is_complete:
            try:
                Storage(self.path).delete()
            except StorageError:
                # The next start does it; why the save failed is what the user is to read.
                return

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
            self._on_end()

    @property
    def _own(self) -> int:
        return self._world.ranks[self._world.rank]

    def _write(self, storage: Storage) -> Digests:
        """Writes this rank's parts; returns the digests of the arrays that are its alone."""
        digests: Digests = {}
        while self._values:
            entry, value = self._values.pop()
            array = storage.create(entry.name, entry.shape, entry.dtype)
            parts = [(shard.box, shard.get(value)) for shard in entry.shards]
            storage.write(array, parts)
            if self._writers[entry.name] == (self._own,):
                is_whole = len(parts) == 1 and parts[0][1].shape == entry.shape
                found = parts[0][1] if is_whole else None
                digests |= read_back(storage, entry.name, entry.shape, entry.dtype, found)
                del found
            del value, parts
        storage.write_json(f"parts/{self._own}", {})
        return digests

    def _digest_shared(self, storage: Storage) -> Digests:
        """The digests of this rank's share of the files that several ranks write."""
        shared = {
            name: ranks
            for name, ranks in self._writers.items()
            if len(ranks) > 1 and self._own in ranks
        }
        others = {rank for ranks in shared.values() for rank in ranks}
        digests: Digests = {}
        if self._wait_for(storage, "parts", others):
            for name, ranks in shared.items():
                shape, dtype = self._manifest.arrays[name]
                digests |= read_back(
                    storage, name, shape, dtype, place=ranks.index(self._own), count=len(ranks)
                )
        return digests

    def _wait_for(self, storage: Storage, kind: str, ranks: set[int]) -> bool:
        """Waits for a file of each of some ranks; whether all are there."""
        end, missing = time.monotonic() + _PARTS_SECONDS, ranks - {self._own}
        while missing and not self._given_up.is_set():
            missing -= {rank for rank in missing if storage.read(f"{kind}/{rank}") is not None}
            if missing and time.monotonic() > end:
                raise StorageError(
                    f"{self.path}: the parts of ranks {sorted(missing)} did not come within "
                    f"{_PARTS_SECONDS:.0f} s. Do all ranks reach this folder?"
                )
            if missing:
                time.sleep(_LOOK_SECONDS)
        return not missing

    def _finish(self, storage: Storage) -> None:
        """Writes the manifest when all parts are there, and read back."""
        if not self._wait_for(storage, "digests", set(self._world.ranks)):
            return
        digests: Digests = {}
        for rank in self._world.ranks:
            digests |= storage.read_json(f"digests/{rank}")
        wanted = {
            key
            for name, array in self._manifest.arrays.items()
            for key in keys_of(name, array, chunk_shape_of(*array))
        }
        if missing := sorted(wanted - digests.keys()):
            raise StorageError(f"{self.path}: no rank has written {', '.join(missing[:3])}.")
        self._manifest = dataclasses.replace(self._manifest, files=digests)
        self._manifest.write(storage)
        self._is_complete = True
        for kind in ("parts", "digests"):
            storage.delete_below(kind)
        storage.delete_file(UNFINISHED)
        directory, _, folder = self.path.rpartition("/")
        record_newest(directory, folder)
        self._on_complete(self.path)


def _check_state(state: Any) -> dict[str, Any]:
    """A copy of a state, as reading it will give it; refuses what JSON cannot hold."""
    if state is None:
        return {}
    if not isinstance(state, dict):
        raise TypeError(f"`state` is a dict that JSON can hold. Received: {checks.shown(state)}.")
    try:
        return json.loads(json.dumps(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise type(error)(f"`state` is a dict that JSON can hold: {error}.") from error
