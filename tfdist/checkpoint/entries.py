"""The training state of a model as global arrays with names, and what this rank holds of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoint.counts import counts_of, own_entry
from tfdist.checkpoint.kept import KeptArrays
from tfdist.checkpoint.manifest import FORMAT, Arrays, format1
from tfdist.checkpoint.names import model_names, optimizer_names
from tfdist.checkpoint.shards import Entry, shards_of
from tfdist.collectives import Group
from tfdist.collectives.objects import all_gather_object
from tfdist.sharding.kept import KeptState, kept_states_of
from tfdist.sharding.layout import global_shape, layout_of
from tfdist.step.context import DistributedStrategy, role_of, strategy_of
from tfdist.step.local_steps import local_optimizer

Named = list[tuple[keras.Variable, str]]


def entries_of(
    model: keras.Model, version: int = FORMAT, states: Sequence[KeptState] | None = None
) -> list[Entry]:
    """The entries of a model's variables and of its optimizer's, those of this rank.

    Both are built. Names are those of that `version` of the format; `states` are what else is kept, by
    default what the strategy and its stages keep.
    """
    strategy = strategy_of(model)
    named, held = _named_variables(model, version)
    found = [(v, f"model/{name}") for v, name in held]
    if getattr(model, "optimizer", None) is not None:
        if version == 1:
            trained = [(v, name) for v, name in named if v.trainable]
            found += format1().optimizer_names(model.optimizer, trained)
        else:
            trained = [(v, name) for v, name in held if v.trainable]
            found += optimizer_names(model.optimizer, trained)
    local = local_optimizer(model)
    pairs = [] if local is None else local.global_variables
    agreed = {id(variable): kept for variable, kept in pairs}
    copies = {id(kept) for _, kept in pairs}
    entries = []
    for variable, name in found:
        if tf.as_dtype(variable.dtype) == tf.string or id(variable) in copies:
            continue
        if layout_of(variable).local_over:
            entries.append(own_entry(variable, name, _writes(variable, name, strategy), strategy))
            if id(variable) not in agreed:
                continue
            # Under the parameter's name goes what ranks have agreed on.
            variable = agreed[id(variable)]
        entries.append(
            Entry(
                name,
                global_shape(variable),
                str(variable.dtype),
                variable,
                tuple(shards_of(variable)),
                _writes(variable, name, strategy),
            )
        )
    kept = KeptArrays(model, kept_states_of(model) if states is None else states, held)
    return entries + counts_of(model, held, version) + kept.entries()


def held_variables(model: keras.Model) -> Named:
    """The variables of a model that this rank holds, with their names."""
    return _named_variables(model, FORMAT)[1]


def _named_variables(model: Any, version: int) -> tuple[Named, Named]:
    """All variables of a model with their names, and those that this rank holds."""
    whole = role_of(model).whole_model
    if whole is not None:
        every, own = model.chain_variables
        root = whole
    else:
        every = own = list(model.variables)
        root = model
    here = {id(variable) for variable in own}
    names = format1().model_names(every) if version == 1 else model_names(root, every)
    named = list(zip(every, names, strict=True))
    return named, [(v, name) for v, name in named if id(v) in here]


def arrays_of(entries: Sequence[Entry], world: Group) -> Arrays:
    """By name, shape and dtype of the entries of all ranks, which all call this."""
    return held_by(entries, world)[0]


def held_by(entries: Sequence[Entry], world: Group) -> tuple[Arrays, dict[str, tuple[int, ...]]]:
    """The arrays of all ranks, which all call this, and by name the ranks that write each."""
    own = {entry.name: (entry.shape, entry.dtype, entry.writes) for entry in entries}
    arrays: Arrays = {}
    writers: dict[str, tuple[int, ...]] = {}
    every = all_gather_object(own, world, name="checkpoint/arrays")
    for rank, some in zip(world.ranks, every, strict=True):
        for name, (shape, dtype, writes) in some.items():
            arrays[name] = shape, dtype
            writers[name] = (*writers.get(name, ()), *((rank,) if writes else ()))
    return dict(sorted(arrays.items())), writers


def _writes(variable, name: str, strategy: DistributedStrategy | None) -> bool:
    """Whether this rank writes its part, which others may hold too."""
    layout = layout_of(variable)
    if strategy is None:
        return True
    if layout.stage is None:
        # What is in no stage the first one writes.
        place = strategy.mesh.coordinates()
        if any(place[axis] for axis in strategy.mesh.stage_axes):
            return False
    elif not layout.counts:
        return False
    axes = layout.replicated_axes(strategy.mesh)
    if not axes:
        return True
    # The ranks that hold the same share the work.
    holders = strategy.group(*axes)
    return zlib.crc32(name.encode()) % holders.size == holders.rank
