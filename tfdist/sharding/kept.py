"""`KeptState`: what a checkpoint keeps of a training in addition to its model."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras

from tfdist.step.context import strategy_of
from tfdist.step.hooks import FitHook, fit_hooks


@dataclasses.dataclass(frozen=True, eq=False)
class VariableKey:
    """The key of an array that belongs to a variable of the model, as a moment does.

    In a checkpoint it is named by the variable's name there.

    Attributes:
        variable: The variable, of those that this rank holds.
        name: What the array is of it.
    """

    variable: Any
    name: str

    def __hash__(self) -> int:
        return hash((id(self.variable), self.name))

    def __eq__(self, other: object) -> bool:
        # Keras' variables compare their values.
        return (
            isinstance(other, VariableKey)
            and self.variable is other.variable
            and self.name == other.name
        )


Key = str | VariableKey


@dataclasses.dataclass(frozen=True)
class Kept:
    """A variable that a checkpoint keeps.

    Attributes:
        variable: The variable. One that was made under a strategy is saved as a global array, and
            restored on any mesh.
        own_rank: Whether each rank has another value, which is restored on a mesh of the same shape alone.
    """

    variable: Any
    own_rank: bool = False


class KeptState:
    """A state that is saved and restored with a model: of a stage, of a hook, or of the user's.

    Found are those of `strategy.keep(state)`, and what stages of gradients and hooks of `fit` return as
    theirs. All ranks must have the same ones, in the same order. Arrays are saved and restored by every
    checkpoint; `values` by those of a `Checkpointer` alone.

    Attributes:
        name: What its arrays and values are called in a checkpoint, unique among the states.
    """

    name: str = ""

    def prepare(self, saved: Collection[Key]) -> None:
        """Called before arrays are read: makes the variables that a checkpoint has values for.

        Args:
            saved: The keys of the arrays that it has, those of this rank among what each rank has.
        """
        del saved

    def arrays(self) -> Mapping[Key, Kept]:
        """The variables to save, or to give the values of a checkpoint."""
        return {}

    def missing(self, keys: Sequence[Key]) -> None:
        """Called after reading: the variables of these keys have kept their values.

        Args:
            keys: Those of `arrays` for which the checkpoint has nothing, or another shape.
        """
        del keys

    def values(self, *, in_epoch: bool) -> Any:
        """What else is kept, of the chief's: anything that JSON can hold, or None.

        Args:
            in_epoch: Whether the epoch continues after the save.
        """
        del in_epoch

    def restore(self, values: Any) -> None:
        """Continues from what `values` has returned; on every rank, before a batch is drawn.

        Raises:
            ValueError: It cannot.
        """
        del values


def kept_states_of(model: keras.Model, hooks: Sequence[FitHook] | None = None) -> list[KeptState]:
    """The states of a model's strategy, of its stages, and of hooks, each once.

    Args:
        model: The model.
        hooks: Those of the `fit` under way; None outside of one.
    """
    strategy = strategy_of(model)
    if strategy is None:
        return []
    found = list(strategy.kept_states)
    for stage in strategy.gradient_stages:
        found += stage.kept_states(model)
    for hook in fit_hooks(model) if hooks is None else hooks:
        if hook not in strategy.gradient_stages:
            found += hook.kept_states(model)
    return list({id(state): state for state in found}.values())
