"""The arrays and values of kept states in a checkpoint: their names, and how they are restored."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

import keras

from tfdist.checkpoint.manifest import Arrays
from tfdist.checkpoint.shards import Entry, shards_of
from tfdist.sharding.kept import Kept, KeptState, Key, VariableKey
from tfdist.sharding.layout import global_shape, layout_of
from tfdist.step.context import strategy_of

Named = Sequence[tuple[keras.Variable, str]]
#: The first parts of the names of other arrays.
_TAKEN = {"local", "metrics", "model", "optimizer"}


def named_states(states: Sequence[KeptState]) -> dict[str, KeptState]:
    """States by name; the second and later ones with the same name get a number.

    Raises:
        ValueError: A state has no name, or one that is not valid in a path.
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
        """The entries of all arrays, each of which may be missing in a checkpoint."""
        return [
            entry
            for place, state in self._states.items()
            for entry in self._entries(place, state).values()
        ]

    def prepare(self, saved: Collection[str]) -> None:
        """Makes states create the variables that a checkpoint has values for.

        Args:
            saved: The names of the arrays in the checkpoint.
        """
        for place, state in self._states.items():
            own = self._own(place)
            keys: list[Key] = []
            for name in saved:
                if name.startswith(f"{place}/"):
                    rest = name.removeprefix(own if name.startswith(own) else f"{place}/")
                    variable, _, last = rest.rpartition("/")
                    known = self._variables.get(variable)
                    keys.append(rest if known is None else VariableKey(known, last))
            state.prepare(keys)

    def report_missing(self, saved: Arrays) -> None:
        """Reports to each state which of its arrays are missing in a checkpoint."""
        for place, state in self._states.items():
            entries = self._entries(place, state)
            state.missing([key for key, e in entries.items() if saved.get(e.name) != e.array])

    def _entries(self, place: str, state: KeptState) -> dict[Key, Entry]:
        found: dict[Key, Entry] = {}
        for key, kept in state.arrays().items():
            prefix = self._own(place) if kept.own_rank else f"{place}/"
            name = key if isinstance(key, str) else self._name_of(state, key)
            found[key] = self._entry(f"{prefix}{name}", kept)
        return found

    def _name_of(self, state: KeptState, key: VariableKey) -> str:
        variable = key.variable
        if id(variable) not in self._names:
            raise ValueError(
                "A kept state can only have arrays for variables of the model that this rank holds. "
                f"Received: `{getattr(variable, 'path', variable)}` of {type(state).__name__}."
            )
        return f"{self._names[id(variable)]}/{key.name}"

    def _own(self, place: str) -> str:
        """The prefix of arrays that only this rank has, which depend on the shape of the mesh."""
        if self._strategy is None:
            return f"{place}/alone/"
        mesh = self._strategy.mesh
        axes = "-".join(f"{axis}{size}" for axis, size in mesh.shape.items() if size > 1)
        return f"{place}/{axes}/rank{mesh.rank}/"

    def _entry(self, name: str, kept: Kept) -> Entry:
        variable, writes = kept.variable, True
        shape = tuple(variable.shape) if kept.own_rank else global_shape(variable)
        if self._strategy is not None and not kept.own_rank:
            # The first of the ranks with the same part.
            place = self._strategy.mesh.coordinates()
            axes = layout_of(variable).replicated_axes(self._strategy.mesh)
            writes = not any(place[axis] for axis in axes)
        shards = shards_of(variable)
        return Entry(name, shape, str(variable.dtype), variable, shards, writes, is_optional=True)
