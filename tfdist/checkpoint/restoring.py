"""Restores a model's training state on any mesh."""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from tfdist.backend.keras.attributes import stored_value
from tfdist.checkpoint.directory import complete_checkpoints, lost
from tfdist.checkpoint.entries import OPTIMIZER, entries_of, gather_arrays, held_variables
from tfdist.checkpoint.errors import OtherModelError, StorageError
from tfdist.checkpoint.kept import KeptArrays
from tfdist.checkpoint.manifest import Array, Arrays, Manifest, step_of
from tfdist.checkpoint.reading import Reader
from tfdist.checkpoint.saving import run_on_chief, world_of
from tfdist.checkpoint.shards import Entry, whole_box
from tfdist.checkpoint.storage import MANIFEST, Storage
from tfdist.collectives import Group
from tfdist.collectives.objects import all_gather_object
from tfdist.runtime.directories import checked_directory, is_address
from tfdist.sharding.kept import KeptState, kept_states_of
from tfdist.step.local_steps import held_optimizers, local_optimizer
from tfdist.utils import checks

_logger = logging.getLogger("tfdist")
#: More rows than any array with a row for each rank has.
_MAX_ROWS = 1 << 20
#: How many names a message lists.
_LISTED = 10


def restore(path: str | os.PathLike, model: keras.Model) -> Manifest:
    """Restores the state of a model and its optimizer from a checkpoint; all ranks must call it.

    Args:
        path: A checkpoint, or a directory of checkpoints, of which the newest intact one is restored.
        model: The model, built, on any mesh. Its optimizer is built and restored; a model without one
            only gets the weights.

    Returns:
        The manifest, with the step and the other state that was saved.

    Raises:
        StorageError: There is no checkpoint that can be read.
        OtherModelError: It is a checkpoint of a different model.
        NewerFormatError: It was written by a newer version of tfdist.
        TypeError: `path` is not a path.
        ValueError: `path` cannot contain checkpoints.
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
    """Restores as `restore` does, and treats a checkpoint whose state is invalid as corrupt.

    Args:
        path: As for `restore`.
        model: As for `restore`.
        check: Called on the chief with the state. Raises a ValueError if it is invalid, whose message
            is appended to the path.
        states: What else is restored; by default the states of the strategy and its stages.
    """
    states = kept_states_of(model) if states is None else states
    world = world_of(model)
    candidates, warnings = run_on_chief(partial(_candidates, path), world, "candidates")
    for warning in warnings:
        _logger.warning("%s", warning)
    known: dict[type[Manifest], list[Entry]] = {}
    damages: list[str] = []
    for candidate in candidates:
        try:
            manifest = run_on_chief(partial(_manifest, candidate, check), world, "manifest")
            kept = KeptArrays(model, states, held_variables(model))
            kept.prepare(manifest.arrays)
            form = type(manifest)
            if form not in known:
                _build_optimizers(model, manifest)
                known[form] = entries_of(model, states, form)
            entries = _without_new_optimizers(known[form], model, manifest)
            strict = [e for e in entries if e.merge is None and not e.is_optional]
            arrays, _ = gather_arrays(strict, world)
            _check_model(candidate, manifest, arrays)
            _restore(candidate, entries, manifest, world)
            kept.report_missing(manifest.arrays)
            _resume_local_steps(model, entries, manifest)
            return manifest
        except StorageError as error:
            damages.append(str(error))
            if candidate != candidates[-1]:
                _logger.warning("%s Restoring the checkpoint before it.", error)
    raise StorageError(
        " ".join([*warnings, *damages])
        or f"There is no complete checkpoint in {path}: none has a manifest."
    )


def _build_optimizers(model: Any, manifest: Manifest) -> None:
    """Builds optimizers that a custom step builds later, for the parameters that they have trained."""
    names = [(v, n) for v, n in held_variables(model, type(manifest)) if v.trainable]
    for place, optimizer in held_optimizers(model).items():
        saved = [name for name in manifest.arrays if name.startswith(f"{place}/")]
        slots = {name.removeprefix(f"{place}/").partition("/")[2] for name in saved}
        # Keras makes no slots for values that it assigns instead of gradients.
        trained = [
            v for v, n in names if n in slots or getattr(v, "overwrite_with_gradient", False)
        ]
        has_slots = any(name in slots for _, name in names)
        # Others have only scalars, some of which exist before they are built.
        has_more = place != OPTIMIZER and len(saved) > len(optimizer.variables)
        if (has_slots or has_more) and not optimizer.built:
            with model.distribute_strategy.scope():
                optimizer.build(trained if has_slots else model.trainable_variables)


def _without_new_optimizers(entries: list[Entry], model: Any, manifest: Manifest) -> list[Entry]:
    """The entries without those of optimizers beside the model's own that a checkpoint does not have."""
    places = [f"{place}/" for place in held_optimizers(model) if place != OPTIMIZER]
    new = tuple(place for place in places if not any(n.startswith(place) for n in manifest.arrays))
    return [entry for entry in entries if not entry.name.startswith(new)]


def _resume_local_steps(model: keras.Model, entries: Sequence[Entry], manifest: Manifest) -> None:
    """Resumes ranks that train independently from their own values, if all have restored them."""
    local = local_optimizer(model)
    if local is not None:
        trained = {id(variable) for variable, _ in local.global_variables}
        own = [entry for entry in entries if id(entry.variable) in trained]
        local.resume(own=all(manifest.arrays.get(entry.name) == entry.array for entry in own))


def _candidates(path: str) -> tuple[list[str], list[str]]:
    """The checkpoints that may be restored, the preferred one first; and the lines of `lost`."""
    # A damaged checkpoint is not a directory of checkpoints.
    name = path if is_address(path) else os.path.abspath(path)
    if step_of(name.rpartition("/")[2]) is not None:
        is_checkpoint = True
    elif is_address(path):
        is_checkpoint = bool(Storage(path).names(MANIFEST))
    else:
        is_checkpoint = os.path.lexists(os.path.join(path, MANIFEST))
    if is_checkpoint:
        return [path], []
    return [posixpath.join(path, name) for name in complete_checkpoints(path)], lost(path)


def _manifest(path: str, check: Callable[[dict[str, Any]], None]) -> Manifest:
    found = Manifest.read(Storage(path))
    if found is None:
        raise StorageError(f"{path} is not a checkpoint: the manifest is missing.")
    try:
        check(found.state)
    except ValueError as error:
        raise StorageError(f"{path} {error}") from error
    return found


def _check_model(path: str, manifest: Manifest, arrays: Arrays) -> None:
    """Raises OtherModelError if the arrays of a checkpoint are not those of the model.

    Arrays with a row for each rank are ignored, because they may not exist yet; those of an optimizer if the
    model has none.
    """
    has_optimizer = any(name.startswith("optimizer/") for name in arrays)
    kinds = ("model/", "optimizer/") if has_optimizer else ("model/",)
    saved = {n: array for n, array in manifest.arrays.items() if n.startswith(kinds)}
    different = [
        f"{name} ({_described(saved[name])}, in the model {_described(arrays[name])})"
        for name in _layers_first(arrays.keys() & saved.keys())
        if saved[name] != arrays[name]
    ]
    differences = [
        f"{what}: {', '.join(some[:_LISTED])}"
        f"{f' and {len(some) - _LISTED} more' if len(some) > _LISTED else ''}"
        for what, some in (
            ("not in the checkpoint", _layers_first(arrays.keys() - saved.keys())),
            ("not in the model", _layers_first(saved.keys() - arrays.keys())),
            ("different", different),
        )
        if some
    ]
    if differences:
        raise OtherModelError(
            f"{path} is not a checkpoint of this model. Arrays {'; '.join(differences)}."
        )


def _layers_first(names: Iterable[str]) -> list[str]:
    """The names in alphabetical order, those of layers before those of the optimizer."""
    return sorted(names, key=lambda name: (not name.startswith("model/"), name))


def _described(array: Array) -> str:
    return f"{array[1]}{list(array[0])}"


def _restore(path: str, entries: list[Entry], manifest: Manifest, world: Group) -> None:
    """Reads all of this rank's parts, and assigns them if all ranks could read theirs."""
    values: list[tuple[Entry, np.ndarray]] = []
    error: Exception | None = None
    try:
        reader = Reader(Storage(path), manifest)
        for entry in entries:
            saved = manifest.arrays.get(entry.name)
            if entry.is_optional and saved != entry.array:
                continue
            if entry.merge is None or saved is not None:
                values.append((entry, _value(entry, manifest, reader)))
    except Exception as found:  # Reported to the other ranks, whatever it is.
        error = found
    own = None if error is None else (isinstance(error, StorageError), str(error))
    for each in filter(None, all_gather_object(own, world, name="checkpoint/errors")):
        if error is not None and not isinstance(error, StorageError):
            raise error
        is_damage, text = each
        raise StorageError(text) if is_damage else RuntimeError(f"Another rank failed: {text}")
    for entry, value in values:
        stored_value(entry.variable).assign(value)


def _value(entry: Entry, manifest: Manifest, reader: Reader) -> np.ndarray:
    """The value that this rank's variable gets."""
    value = np.array(stored_value(entry.variable).numpy())
    shape, dtype = manifest.arrays[entry.name]
    if entry.merge is not None and (shape, dtype) != entry.array:
        is_same = (shape[1:], dtype) == (entry.shape[1:], entry.dtype)
        if not is_same or not shape or not 0 < shape[0] <= _MAX_ROWS:
            return value
        (rows,) = reader.read(entry.name, [whole_box(shape)])
        return np.asarray(entry.merge(rows), value.dtype)
    parts = reader.read(entry.name, [shard.box for shard in entry.shards])
    for shard, part in zip(entry.shards, parts, strict=True):
        shard.put(value, part)
    return value
