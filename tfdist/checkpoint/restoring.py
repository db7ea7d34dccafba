"""Restores a model's training state, on whatever mesh."""

from __future__ import annotations

import logging
import os
from typing import Any

import keras
import numpy as np

from tfdist.checkpoint.entries import Entry, arrays_of, entries_of
from tfdist.checkpoint.manifest import Manifest, complete_checkpoints
from tfdist.checkpoint.saving import world_of
from tfdist.checkpoint.storage import Storage, StorageError
from tfdist.collectives import Group
from tfdist.collectives.objects import all_gather_object, broadcast_object

__all__ = ["latest", "restore"]

_logger = logging.getLogger("tfdist")


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
        ValueError: It is one of another model, or of a newer tfdist.
    """
    world = world_of(model)
    path = os.fspath(path).rstrip("/")
    entries = entries_of(model)
    names = arrays_of(entries, world)
    damages: list[str] = []
    for candidate in _candidates(path, world):
        try:
            manifest = _manifest(candidate, world)
            _check_model(candidate, manifest, names)
            _restore(candidate, entries, world)
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
        is_one = bool(Storage(path).names("manifest.json"))
        found = [path] if is_one else [f"{path}/{name}" for name in complete_checkpoints(path)]
    return broadcast_object(found, world, name="checkpoint/candidates")


def _manifest(path: str, world: Group) -> Manifest:
    found: Any = None
    if world.rank == 0:
        try:
            found = Manifest.read(Storage(path))
        except (StorageError, ValueError) as error:
            found = error
    found = broadcast_object(found, world, name="checkpoint/manifest")
    if isinstance(found, Exception):
        raise found
    if found is None:
        raise StorageError(f"{path} has no manifest: it was never completed.")
    return found


def _check_model(path: str, manifest: Manifest, names: dict) -> None:
    """Raises where the arrays of a checkpoint are not those of the model."""
    missing = sorted(names.keys() - manifest.arrays.keys())
    extra = sorted(manifest.arrays.keys() - names.keys())
    other = [
        f"{name} ({_described(manifest.arrays[name])}, in the model {_described(names[name])})"
        for name in sorted(names.keys() & manifest.arrays.keys())
        if manifest.arrays[name] != names[name]
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
        raise ValueError(f"{path} is a checkpoint of another model. {'; '.join(said)}.")


def _described(array: tuple[tuple[int, ...], str]) -> str:
    return f"{array[1]}{list(array[0])}"


def _restore(path: str, entries: list[Entry], world: Group) -> None:
    """Reads all of this rank's parts; assigns them if all ranks could."""
    values: list[np.ndarray] = []
    error = None
    try:
        storage = Storage(path)
        for entry in entries:
            value = np.array(entry.variable._value.numpy())
            array = storage.open(entry.name, entry.shape, entry.dtype)
            for piece in entry.pieces:
                piece.put(value, storage.read(array, entry.name, piece.box))
            values.append(value)
    except StorageError as damage:
        error = str(damage)
    for found in all_gather_object(error, world, name="checkpoint/errors"):
        if found:
            raise StorageError(found)
    for entry, value in zip(entries, values, strict=True):
        entry.variable._value.assign(value)
