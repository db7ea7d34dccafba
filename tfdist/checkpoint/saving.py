"""Saves a model's training state: every rank writes its part, the chief the manifest."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.checkpoint.entries import arrays_of, entries_of
from tfdist.checkpoint.manifest import Manifest, folder_of
from tfdist.checkpoint.pieces import Entry
from tfdist.checkpoint.storage import Storage, StorageError
from tfdist.collectives import Group
from tfdist.collectives.local import LocalEngine
from tfdist.collectives.objects import all_gather_object, broadcast_object

__all__ = ["Save", "Saver", "begin_save", "save", "world_of"]

#: How long the chief waits for the other ranks' parts.
_PARTS_SECONDS = 1800.0


def save(
    directory: str, model: keras.Model, *, step: int, state: dict[str, Any] | None = None
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
        StorageError: It cannot be written; on all ranks.
    """
    return begin_save(directory, model, step=step, state=state).wait()


def begin_save(
    directory: str, model: keras.Model, *, step: int, state: dict[str, Any] | None = None
) -> Save:
    """As `save`, but writing goes on in a thread; training may go on meanwhile."""
    return Saver(directory, model).begin(step, state)


class Saver:
    """Saves a model again and again; what stays the same the ranks agree on once.

    Args:
        directory: As in `save`.
        model: The model; its variables stay these.
    """

    def __init__(self, directory: str, model: keras.Model):
        self._directory = str(directory).rstrip("/")
        self._world = world_of(model)
        self._token = broadcast_object(secrets.token_hex(4), self._world, name="checkpoint")
        self._entries = entries_of(model)
        self._arrays = dict(sorted(arrays_of(self._entries, self._world).items()))

    def begin(
        self,
        step: int,
        state: dict[str, Any] | None = None,
        on_complete: Callable[[str], None] = lambda path: None,
    ) -> Save:
        """Copies this rank's parts, and writes them in a thread.

        Args:
            step: The number of the training step.
            state: What else is to be kept.
            on_complete: Called on the chief, in that thread, with the path of the complete
                checkpoint. What it raises, `Save.wait` raises on all ranks.
        """
        path = f"{self._directory}/{folder_of(step, self._token)}"
        manifest = Manifest(step, self._arrays, dict(state or {}))
        return Save(path, self._entries, manifest, self._world, on_complete)


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

    def __init__(
        self,
        path: str,
        entries: Sequence[Entry],
        manifest: Manifest,
        world: Group,
        on_complete: Callable[[str], None],
    ):
        self.path = path
        self._manifest, self._world, self._on_complete = manifest, world, on_complete
        # Copies: what is trained on meanwhile does not reach them.
        self._values: list[tuple[Entry, np.ndarray]] = [
            (entry, entry.variable._value.numpy()) for entry in entries if entry.writes
        ]
        self._error: str | None = None
        self._written, self._given_up = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tfdist-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> str:
        """Returns the path when the checkpoint is complete; all ranks call it.

        Raises:
            StorageError: It could not be written; on all ranks.
        """
        # First the parts: the chief need not wait for one that will not come.
        self._written.wait()
        self._raise_any("written")
        self._thread.join()
        self._raise_any("completed")
        return self.path

    def _raise_any(self, stage: str) -> None:
        errors = all_gather_object(self._error, self._world, name=f"checkpoint/{stage}")
        for rank, error in zip(self._world.ranks, errors, strict=True):
            if error:
                self._given_up.set()
                raise StorageError(f"Rank {rank} could not save: {error}")

    def _run(self) -> None:
        begun = time.perf_counter()
        try:
            storage = Storage(self.path)
            self._write(storage)
            self._written.set()
            if self._world.rank == 0:
                self._finish(storage)
        except StorageError as error:
            self._error = str(error)
        except Exception as error:  # Raised again by `wait`, on all ranks.
            self._error = f"{type(error).__name__}: {error}"
        self._written.set()
        self.seconds = time.perf_counter() - begun

    def _write(self, storage: Storage) -> None:
        while self._values:
            entry, value = self._values.pop()
            array = storage.create(entry.name, entry.shape, entry.dtype)
            storage.write(array, ((piece.box, piece.get(value)) for piece in entry.pieces))
        storage.write_json(_part(self._world.ranks[self._world.rank]), {})

    def _finish(self, storage: Storage) -> None:
        """Writes the manifest when all parts are there."""
        end, missing = time.monotonic() + _PARTS_SECONDS, set(self._world.ranks)
        while missing and not self._given_up.is_set():
            missing -= {rank for rank in missing if storage.read_json(_part(rank)) is not None}
            if missing and time.monotonic() > end:
                raise StorageError(
                    f"{self.path}: the parts of ranks {sorted(missing)} did not come within "
                    f"{_PARTS_SECONDS:.0f} s. Do all ranks reach this folder?"
                )
            if missing:
                time.sleep(0.02)
        if not missing:
            self._manifest.write(storage)
            self._on_complete(self.path)


def _part(rank: int) -> str:
    """The file by which a rank says that its part is written."""
    return f"parts/{rank}"
