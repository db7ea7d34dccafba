"""The training state of a model as named global arrays, and this rank's parts of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.checkpoint.counts import counts_of, own_entry
from tfdist.checkpoint.kept import KeptArrays
from tfdist.checkpoint.manifest import Arrays, Manifest
from tfdist.checkpoint.shards import Entry, shards_of
from tfdist.collectives import Group
from tfdist.collectives.objects import all_gather_object
from tfdist.sharding.kept import KeptState, kept_states_of
from tfdist.sharding.layout import global_shape, layout_of
from tfdist.step.context import DistributedStrategy, role_of, strategy_of
from tfdist.step.local_steps import held_optimizers, local_optimizer

Named = list[tuple[keras.Variable, str]]

#: The attribute of a compiled model, and the first part of the names of its variables.
OPTIMIZER = "optimizer"


def entries_of(
    model: keras.Model,
    states: Sequence[KeptState] | None = None,
    form: type[Manifest] = Manifest,
) -> list[Entry]:
    """The entries of this rank for the variables of a model and of its optimizer.

    Args:
        model: The model, built. Its optimizer is built, if there is one.
        states: What else is saved; by default the states of the strategy and its stages.
        form: The format, which determines the names.
    """
    strategy = strategy_of(model)
    held = held_variables(model, form)
    found = [(v, f"model/{name}") for v, name in held]
    trained = [(v, name) for v, name in held if v.trainable]
    for place, optimizer in held_optimizers(model).items():
        if model.built and not optimizer.built and place == OPTIMIZER:
            with model.distribute_strategy.scope():
                optimizer.build(model.trainable_variables)
        named = form.names.optimizer_names(optimizer, trained)
        found += [(v, name.replace(OPTIMIZER, place, 1)) for v, name in named]
    local = local_optimizer(model)
    pairs = [] if local is None else local.global_variables
    agreed = {id(variable): kept for variable, kept in pairs}
    copies = {id(kept) for _, kept in pairs}
    entries = []
    for variable, name in found:
        if tf.as_dtype(variable.dtype) == tf.string or id(variable) in copies:
            continue
        writes = _writes(variable, name, strategy)
        if layout_of(variable).local_over:
            entries.append(own_entry(variable, name, writes, strategy))
            if id(variable) not in agreed:
                continue
            # The parameter's name is used for the value at the last synchronization.
            variable = agreed[id(variable)]
            writes = _writes(variable, name, strategy)
        shape, dtype = global_shape(variable), str(variable.dtype)
        entries.append(Entry(name, shape, dtype, variable, shards_of(variable), writes))
    kept = KeptArrays(model, kept_states_of(model) if states is None else states, held)
    return entries + counts_of(model, held, form) + kept.entries()


def held_variables(model: Any, form: type[Manifest] = Manifest) -> Named:
    """The variables of a model that this rank holds, with their names."""
    root, every, own = role_of(model).whole_model, model.variables, model.variables
    if root is not None:
        every, own = model.chain_variables
    here = {id(variable) for variable in own}
    names = form.names.model_names(model if root is None else root, every)
    return [(v, name) for v, name in zip(every, names, strict=True) if id(v) in here]


def gather_arrays(
    entries: Sequence[Entry], world: Group
) -> tuple[Arrays, dict[str, tuple[int, ...]]]:
    """The arrays of all ranks, and the ranks that write each, by name; all ranks must call this."""
    own = {entry.name: (entry.array, entry.writes) for entry in entries}
    arrays: Arrays = {}
    writers: dict[str, tuple[int, ...]] = {}
    every = all_gather_object(own, world, name="checkpoint/arrays")
    for rank, some in zip(world.ranks, every, strict=True):
        for name, (array, writes) in some.items():
            if arrays.setdefault(name, array) != array:
                raise ValueError(
                    f"Ranks must agree on the array {name!r}. Received: {arrays[name]} and {array}."
                )
            writers[name] = writers.get(name, ()) + ((rank,) if writes else ())
    return dict(sorted(arrays.items())), writers


def _writes(variable, name: str, strategy: DistributedStrategy | None) -> bool:
    """Whether this rank writes its part, of the ranks that have the same part."""
    layout = layout_of(variable)
    if strategy is None:
        return True
    if layout.stage is None:
        stages = strategy.group(*strategy.mesh.stage_axes)
        if stages.size > 1 and name.startswith("optimizer/") and len(variable.shape):
            raise ValueError(
                "Checkpoints of a pipeline require an optimizer that makes its state by "
                f"`add_variable_from_reference`, unlike Adafactor. Received: {name!r}, of no known stage."
            )
        # A variable that belongs to no stage is written by the first one.
        if stages.rank:
            return False
    elif not layout.counts:
        return False
    axes = layout.replicated_axes(strategy.mesh)
    if not axes:
        return True
    # The ranks with the same part share the work.
    holders = strategy.group(*axes)
    return zlib.crc32(name.encode()) % holders.size == holders.rank
