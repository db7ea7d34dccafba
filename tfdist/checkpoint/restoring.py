"""Restores a model's training state, on whatever mesh."""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.backend.keras.attributes import stored_value
from tfdist.checkpoint.directory import complete_checkpoints, lost
from tfdist.checkpoint.entries import arrays_of, entries_of, held_variables
from tfdist.checkpoint.errors import CheckpointError, OtherModelError, StorageError
from tfdist.checkpoint.kept import KeptArrays
from tfdist.checkpoint.manifest import FORMAT, Array, Arrays, Manifest, step_of
from tfdist.checkpoint.reading import Reader
from tfdist.checkpoint.saving import world_of
from tfdist.checkpoint.shards import Entry
from tfdist.checkpoint.storage import MANIFEST, Storage
from tfdist.collectives import Group
from tfdist.collectives.objects import all_gather_object, broadcast_object
from tfdist.runtime.directories import checked_directory, is_address
from tfdist.sharding.kept import KeptState, kept_states_of
from tfdist.step.local_steps import local_optimizer
from tfdist.utils import checks

_logger = logging.getLogger("tfdist")
#: No job has more ranks, each of which has a row in what is counted.
_ROWS = 1 << 20
#: How many names a message lists.
_LISTED = 10


def restore(path: str | os.PathLike, model: keras.Model) -> Manifest:
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
        TypeError: `path` is no path.
        ValueError: `path` is that of nothing that checkpoints can lie in.
    """
    path = checked_directory(path, "path")
    checks.instance("model", model, keras.Model, "a Keras model")
    return restore_checked(path, model, lambda state: None)


def restore_checked(
    path: str,
    model: keras.Model,
    check: Callable[[dict[str, Any]], None],
    states: Sequence[KeptState] | None = None,
) -> Manifest:
    """As `restore`; a checkpoint counts as damaged where `check` refuses its state.

    The chief calls `check`, which raises a ValueError that goes on behind the path. `states` are what else
    is restored, by default what the strategy and its stages keep.
    """
    states = kept_states_of(model) if states is None else states
    world = world_of(model)
    candidates, warnings = _candidates(path, world)
    for warning in warnings:
        _logger.warning("%s", warning)
    entries: dict[int, list[Entry]] = {}
    damages: list[str] = []
    for candidate in candidates:
        try:
            manifest = _manifest(candidate, world, check)
            version = 1 if manifest.files is None else FORMAT
            kept = KeptArrays(model, states, held_variables(model))
            kept.prepare(manifest.arrays)
            if version not in entries:
                entries[version] = entries_of(model, version, states)
            strict = [e for e in entries[version] if e.merge is None and not e.is_optional]
            _check_model(candidate, manifest, arrays_of(strict, world))
            _restore(candidate, entries[version], manifest, world)
            kept.report_missing(manifest.arrays)
            _resume_local_steps(model, entries[version], manifest)
        except StorageError as error:
            damages.append(str(error))
            if candidate != candidates[-1]:
                _logger.warning("%s The checkpoint before it is taken.", error)
            continue
        return manifest
    raise StorageError(
        " ".join([*warnings, *damages])
        or f"There is no complete checkpoint in {path}: none has a manifest."
    )


def _resume_local_steps(model: keras.Model, entries: Sequence[Entry], manifest: Manifest) -> None:
    """Where ranks step apart each goes on by itself if all have found what they had."""
    local = local_optimizer(model)
    if local is None:
        return
    trained = {id(variable) for variable, _ in local.global_variables}
    own = [entry for entry in entries if id(entry.variable) in trained]
    local.resume(
        own=all(manifest.arrays.get(entry.name) == (entry.shape, entry.dtype) for entry in own)
    )


def _candidates(path: str, world: Group) -> tuple[list[str], list[str]]:
    """What may be restored, the first first, and what is lost; as the chief sees it."""
    found: Any = None
    if world.rank == 0:
        try:
            if _is_one(path):
                found = [path], []
            else:
                names = complete_checkpoints(path)
                found = [posixpath.join(path, name) for name in names], lost(path)
        except StorageError as error:
            found = error
    return _agreed(found, world, "candidates")


def _is_one(path: str) -> bool:
    """Whether a path is that of a checkpoint, damaged or not, and not of a directory with some."""
    folder = os.path.basename(os.path.abspath(path)) if not is_address(path) else path
    if step_of(folder.rpartition("/")[2]) is not None:
        return True
    if is_address(path):
        return bool(Storage(path).names(MANIFEST))
    return os.path.lexists(os.path.join(path, MANIFEST))


def _manifest(path: str, world: Group, check: Callable[[dict[str, Any]], None]) -> Manifest:
    found: Any = None
    if world.rank == 0:
        try:
            found = Manifest.read(Storage(path))
            if found is None:
                raise StorageError(f"{path} is no checkpoint: it has no manifest.")
            try:
                check(found.state)
            except ValueError as error:
                raise StorageError(f"{path} {error}") from error
        except CheckpointError as error:
            found = error
    return _agreed(found, world, "manifest")


def _agreed(found: Any, world: Group, name: str) -> Any:
    """What the chief has found, on all ranks; raised where it is an error."""
    found = broadcast_object(found, world, name=f"checkpoint/{name}")
    if isinstance(found, CheckpointError):
        raise found
    return found


def _check_model(path: str, manifest: Manifest, names: Arrays) -> None:
    """Raises where the arrays of a checkpoint are not those of the model.

    What ranks count for themselves is left out: it may be that nothing was counted yet.
    """
    saved = {
        name: array
        for name, array in manifest.arrays.items()
        if name.partition("/")[0] in ("model", "optimizer")
    }
    other = [
        f"{name} ({_described(saved[name])}, in the model {_described(names[name])})"
        for name in _layers_first(names.keys() & saved.keys())
        if saved[name] != names[name]
    ]
    said = [
        f"{what}: {', '.join(some[:_LISTED])}"
        f"{f' and {len(some) - _LISTED} more' if len(some) > _LISTED else ''}"
        for what, some in (
            ("not in the checkpoint", _layers_first(names.keys() - saved.keys())),
            ("not in the model", _layers_first(saved.keys() - names.keys())),
            ("different", other),
        )
        if some
    ]
    if said:
        raise OtherModelError(f"{path} is a checkpoint of another model. {'; '.join(said)}.")


def _layers_first(names: Iterable[str]) -> list[str]:
    """Names in order, those of layers before those of the optimizer's slots for them."""
    return sorted(names, key=lambda name: (not name.startswith("model/"), name))


def _described(array: Array) -> str:
    return f"{array[1]}{list(array[0])}"


def _restore(path: str, entries: list[Entry], manifest: Manifest, world: Group) -> None:
    """Reads all of this rank's parts; assigns them if all ranks could."""
    values: list[tuple[Entry, np.ndarray]] = []
    error: Exception | None = None
    try:
        reader = Reader(Storage(path), manifest)
        for entry in entries:
            is_same = manifest.arrays.get(entry.name) == (entry.shape, entry.dtype)
            if entry.is_optional and not is_same:
                continue
            if entry.merge is None or entry.name in manifest.arrays:
                values.append((entry, _value(entry, manifest, reader)))
    except Exception as found:  # The other ranks hear of it, whatever it is.
        error = found
    for each in all_gather_object(
        None if error is None else (isinstance(error, StorageError), str(error)),
        world,
        name="checkpoint/errors",
    ):
        if each is None:
            continue
        if error is not None and not isinstance(error, StorageError):
            raise error
        is_damage, said = each
        raise StorageError(said) if is_damage else RuntimeError(f"Another rank failed: {said}")
    for entry, value in values:
        stored_value(entry.variable).assign(value)


def _value(entry: Entry, manifest: Manifest, reader: Reader) -> np.ndarray:
    """What this rank's variable is to hold."""
    value = np.array(stored_value(entry.variable).numpy())
    shape, dtype = manifest.arrays[entry.name]
    if entry.merge is not None and (shape, dtype) != (entry.shape, entry.dtype):
        of_rank = shape[1:], dtype
        if not shape or of_rank != (entry.shape[1:], entry.dtype) or not 0 < shape[0] <= _ROWS:
            return value
        (rows,) = reader.read(entry.name, [tuple(slice(0, size) for size in shape)])
        return np.asarray(entry.merge(rows), value.dtype)
    boxes = [shard.box for shard in entry.shards]
    for shard, part in zip(entry.shards, reader.read(entry.name, boxes), strict=True):
        shard.put(value, part)
    return value
