"""Restores a model's training state, on whatever mesh."""

from __future__ import annotations

import logging
import os
from typing import Any

import keras
import numpy as np

from tfdist.checkpoint.entries import arrays_of, entries_of
from tfdist.checkpoint.manifest import Manifest, NewerFormatError, complete_checkpoints
from tfdist.checkpoint.pieces import Entry
from tfdist.checkpoint.saving import world_of
from tfdist.checkpoint.storage import MANIFEST, CheckpointError, Storage, StorageError
from tfdist.collectives import Group
from tfdist.collectives.objects import all_gather_object, broadcast_object

__all__ = ["OtherModelError", "latest", "restore"]

_logger = logging.getLogger("tfdist")


class OtherModelError(CheckpointError, ValueError):
    """A checkpoint does not hold the arrays of the model."""


def latest(directory: str) -> str | None:
    """The path of the newest complete checkpoint in a directory; None where there is none."""
    found = complete_checkpoints(directory)
    return f"{str(directory).rstrip('/')}/{found[0]}" if found else None


def restore(path: str, model: keras.Model) -> Manifest:
    """Gives a model and its optimizer the state of a checkpoint; all ranks call it.

    Args:
        path: A checkpoint, or a directory with some: then the newest that is not damaged counts.
        model: The model, built, on any mesh; with a built optimizer, if it is to be restored.

    Returns:
        The manifest: the step, and what else was kept.

    Raises:
        StorageError: There is no checkpoint that can be read.
        OtherModelError: It is one of another model.
        NewerFormatError: It was written by a newer tfdist.
    """
    world = world_of(model)
    path = os.fspath(path).rstrip("/")
    entries = entries_of(model)
    strict = [entry for entry in entries if entry.merge is None]
    names = arrays_of(strict, world)
    damages: list[str] = []
    for candidate in _candidates(path, world):
        try:
            manifest = _manifest(candidate, world)
            _check_model(candidate, manifest, names)
            _restore(candidate, entries, manifest, world)
        except StorageError as error:
            _logger.warning("%s The checkpoint before it is taken.", error)
            damages.append(str(error))
            continue
        return manifest
    raise StorageError(
        " ".join(damages) or f"There is no complete checkpoint in {path}: none has a manifest."
    )


def _candidates(path: str, world: Group) -> list[str]:
    """What may be restored, the first first; as the chief sees it."""
    found: list[str] = []
    if world.rank == 0:
        is_one = bool(Storage(path).names(MANIFEST))
        found = [path] if is_one else [f"{path}/{name}" for name in complete_checkpoints(path)]
    return broadcast_object(found, world, name="checkpoint/candidates")


def _manifest(path: str, world: Group) -> Manifest:
    found: Any = None
    if world.rank == 0:
        try:
            found = Manifest.read(Storage(path))
        except (StorageError, NewerFormatError) as error:
            found = error
    found = broadcast_object(found, world, name="checkpoint/manifest")
    if isinstance(found, Exception):
        raise found
    if found is None:
        raise StorageError(f"{path} has no manifest: it was never completed.")
    return found


def _check_model(path: str, manifest: Manifest, names: dict) -> None:
    """Raises where the arrays of a checkpoint are not those of the model.

    What ranks count for themselves is left out: it may be that nothing was counted yet.
    """
    saved = {
        name: array
        for name, array in manifest.arrays.items()
        if name.partition("/")[0] in ("model", "optimizer")
    }
    missing = sorted(names.keys() - saved.keys())
    extra = sorted(saved.keys() - names.keys())
    other = [
        f"{name} ({_described(saved[name])}, in the model {_described(names[name])})"
        for name in sorted(names.keys() & saved.keys())
        if saved[name] != names[name]
    ]
    said = [
        f"{what}: {', '.join(some[:10])}{f' and {len(some) - 10} more' if len(some) > 10 else ''}"
        for what, some in (
            ("not in the checkpoint", missing),
            ("not in the model", extra),
            ("different", other),
        )
        if some
    ]
    if said:
        raise OtherModelError(f"{path} is a checkpoint of another model. {'; '.join(said)}.")


def _described(array: tuple[tuple[int, ...], str]) -> str:
    return f"{array[1]}{list(array[0])}"


def _restore(path: str, entries: list[Entry], manifest: Manifest, world: Group) -> None:
    """Reads all of this rank's parts; assigns them if all ranks could."""
    values: list[tuple[Entry, np.ndarray]] = []
    error = None
    try:
        storage = Storage(path)
        for entry in entries:
            if entry.merge is None or entry.name in manifest.arrays:
                values.append((entry, _value(entry, manifest, storage)))
    except StorageError as damage:
        error = str(damage)
    for found in all_gather_object(error, world, name="checkpoint/errors"):
        if found:
            raise StorageError(found)
    for entry, value in values:
        entry.variable._value.assign(value)


def _value(entry: Entry, manifest: Manifest, storage: Storage) -> np.ndarray:
    """What this rank's variable is to hold."""
    value = np.array(entry.variable._value.numpy())
    shape, dtype = manifest.arrays[entry.name]
    array = storage.open(entry.name, shape, dtype)
    if entry.merge is not None and shape != entry.shape:
        if (shape[1:], dtype) != (entry.shape[1:], entry.dtype):
            return value
        rows = storage.read(array, entry.name, tuple(slice(0, size) for size in shape))
        return np.asarray(entry.merge(rows), value.dtype)
    for piece in entry.pieces:
        piece.put(value, storage.read(array, entry.name, piece.box))
    return value
