"""The arrays and values of kept states in a checkpoint: under which names, and how they come back."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras

from tfdist.checkpoint.manifest import Arrays
from tfdist.checkpoint.shards import Entry, shards_of
from tfdist.sharding.kept import Kept, KeptState, Key, VariableKey
from tfdist.sharding.layout import global_shape, layout_of
from tfdist.step.context import DistributedStrategy, strategy_of

Named = Sequence[tuple[keras.Variable, str]]
#: What the first part of the name of other arrays is.
_TAKEN = {"local", "metrics", "model", "optimizer"}


def named_states(states: Sequence[KeptState]) -> dict[str, KeptState]:
    """States by name; of several of one name the later ones get numbers.

    Raises:
        ValueError: A state has no name, or one that cannot be that of a file.
    """
    found: dict[str, KeptState] = {}
    counted: collections.Counter[str] = collections.Counter()
    for state in states:
        name = state.name
        if not name or name in _TAKEN or not name.replace("_", "").replace("-", "").isalnum():
            raise ValueError(
                "A kept state requires a `name` of letters, digits, hyphens and underscores, other than "
                f"{', '.join(sorted(_TAKEN))}. Received: name={name!r} of {type(state).__name__}."
            )
        counted[name] += 1
        found[name if counted[name] == 1 else f"{name}-{counted[name]}"] = state
    return found


class KeptArrays:
    """The arrays of a model's kept states on this rank.

    Args:
        model: The model.
        states: Its states.
        named: The variables of the model that this rank holds, with their names.
    """

    def __init__(self, model: keras.Model, states: Sequence[KeptState], named: Named):
        self._strategy = strategy_of(model)
        self._states = named_states(states)
        self._names = {id(variable): name for variable, name in named}
        self._variables = {name: variable for variable, name in named}

    def entries(self) -> list[Entry]:
        """The entries of all arrays; each may be missing in a checkpoint."""
        return [
            self._entry(name, kept)
            for place, state in self._states.items()
            for name, kept in self._arrays(place, state).values()
        ]

    def prepare(self, saved: Collection[str]) -> None:
        """Has states make what a checkpoint, whose arrays have these names, has values for."""
        for place, state in self._states.items():
            own = self._own(place)
            keys = []
            for name in saved:
                if name.startswith(own):
                    keys.append(self._key(name.removeprefix(own)))
                elif name.startswith(f"{place}/"):
                    keys.append(self._key(name.removeprefix(f"{place}/")))
            state.prepare(keys)

    def report_missing(self, saved: Arrays) -> None:
        """Tells states which of their arrays a checkpoint has no values for."""
        for place, state in self._states.items():
            entries = {
                key: self._entry(*named) for key, named in self._arrays(place, state).items()
            }
            state.missing(
                [
                    key
                    for key, entry in entries.items()
                    if saved.get(entry.name) != (entry.shape, entry.dtype)
                ]
            )

    def _arrays(self, place: str, state: KeptState) -> dict[Key, tuple[str, Kept]]:
        found: dict[Key, tuple[str, Kept]] = {}
        for key, kept in state.arrays().items():
            prefix = self._own(place) if kept.own_rank else f"{place}/"
            name = key if isinstance(key, str) else self._name_of(state, key)
            found[key] = f"{prefix}{name}", kept
        return found

    def _name_of(self, state: KeptState, key: VariableKey) -> str:
        variable = key.variable
        if id(variable) not in self._names:
            raise ValueError(
                "An array of a kept state can belong to a variable of the model that this rank holds. "
                f"Received: `{getattr(variable, 'path', variable)}` of {type(state).__name__}."
            )
        return f"{self._names[id(variable)]}/{key.name}"

    def _key(self, name: str) -> Key:
        variable, _, last = name.rpartition("/")
        known = self._variables.get(variable)
        return name if known is None else VariableKey(known, last)

    def _own(self, place: str) -> str:
        """What names of this rank's own arrays begin with: they are of one place in one mesh."""
        if self._strategy is None:
            return f"{place}/alone/"
        mesh = self._strategy.mesh
        axes = "-".join(f"{axis}{size}" for axis, size in mesh.shape.items() if size > 1)
        return f"{place}/{axes}/rank{mesh.rank}/"

    def _entry(self, name: str, kept: Kept) -> Entry:
        variable = kept.variable
        shape = tuple(variable.shape) if kept.own_rank else global_shape(variable)
        writes = kept.own_rank or _is_first_holder(variable, self._strategy)
        shards = tuple(shards_of(variable))
        return Entry(name, shape, str(variable.dtype), variable, shards, writes, is_optional=True)


def _is_first_holder(variable: Any, strategy: DistributedStrategy | None) -> bool:
    """Whether this rank is the first of those that hold the same."""
    if strategy is None:
        return True
    axes = layout_of(variable).replicated_axes(strategy.mesh)
    place: Mapping[str, int] = strategy.mesh.coordinates()
    return not any(place[axis] for axis in axes)
