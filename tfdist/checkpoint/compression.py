"""What the compression of gradients keeps, of each rank: residuals, and factors to begin with.

It belongs to a rank and its rows, so on another mesh it begins anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import keras

from tfdist.checkpoint.manifest import Arrays
from tfdist.checkpoint.shards import Entry, shards_of
from tfdist.collectives import Group
from tfdist.compression.state import RESIDUAL
from tfdist.compression.statistics import compression_state_of
from tfdist.context import DistributedStrategy, strategy_of
from tfdist.sharding.layout import layout_of

__all__ = ["compression_entries", "make_slots", "reset_others"]

_logger = logging.getLogger("tfdist")
_KIND = "compression"
_STEPS = f"{_KIND}/steps"


def compression_entries(
    model: keras.Model, named: Sequence[tuple[keras.Variable, str]]
) -> list[Entry]:
    """The entries of what compression keeps on this rank; `named` are its variables, with names."""
    strategy, state = strategy_of(model), compression_state_of(model)
    if strategy is None or state is None:
        return []
    here = _here(strategy)
    entries = [_entry(_STEPS, state.step, strategy.is_chief)]
    for variable, name in named:
        for key, slot in state.slots.get(id(variable), {}).items():
            entries.append(_entry(f"{here}/{name}/{key}", slot, True))
    return entries


def make_slots(
    model: keras.Model, named: Sequence[tuple[keras.Variable, str]], saved: Iterable[str]
) -> None:
    """Makes what a checkpoint has values for; the first step would make it otherwise."""
    strategy, state, saved = strategy_of(model), compression_state_of(model), set(saved)
    if strategy is None or state is None:
        return
    here = _here(strategy)
    for variable, name in named:
        shape = tuple(variable.shape)
        if f"{here}/{name}/{RESIDUAL}" in saved and state.compressor.selects(shape):
            state.slots_of(variable, _gradient_group(strategy, variable))


def reset_others(
    model: keras.Model, named: Sequence[tuple[keras.Variable, str]], saved: Arrays
) -> None:
    """Lets begin anew what a checkpoint has no values for, and says so."""
    strategy, state = strategy_of(model), compression_state_of(model)
    if strategy is None or state is None:
        return
    here = _here(strategy)
    lacks = _STEPS in saved and not any(name.startswith(f"{here}/") for name in saved)
    for variable, name in named:
        for key, slot in state.slots.get(id(variable), {}).items():
            if f"{here}/{name}/{key}" not in saved:
                slot.assign(state.initial(variable, _gradient_group(strategy, variable))[key])
    if lacks and strategy.is_chief:
        _logger.warning(
            "The checkpoint is of another mesh: the residuals of compressed gradients begin at zero."
        )


def _gradient_group(strategy: DistributedStrategy, variable: keras.Variable) -> Group:
    return strategy.group(*layout_of(variable).gradient_axes(strategy.mesh))


def _here(strategy: DistributedStrategy) -> str:
    """What names of this rank's arrays begin with: they are of one place in one mesh."""
    mesh = strategy.mesh
    axes = "-".join(f"{axis}{size}" for axis, size in mesh.shape.items() if size > 1)
    return f"{_KIND}/{axes}/rank{mesh.rank}"


def _entry(name: str, variable: keras.Variable, writes: bool) -> Entry:
    shape, shards = tuple(variable.shape), tuple(shards_of(variable))
    # With `merge`, it may be missing in a checkpoint.
    return Entry(name, shape, variable.dtype, variable, shards, writes, lambda found: found)
