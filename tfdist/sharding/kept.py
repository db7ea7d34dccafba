"""`KeptState`: training state that checkpoints save in addition to the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras

from tfdist.step.context import strategy_of
from tfdist.step.hooks import FitHook, fit_hooks


@dataclasses.dataclass(frozen=True, eq=False)
class VariableKey:
    """The key of an array that belongs to a variable of the model, such as a moment.

    Its name in a checkpoint contains the name of the variable.

    Attributes:
        variable: The variable, one of those that this rank holds.
        name: The name of the array.
    """

    variable: Any
    name: str

    def __hash__(self) -> int:
        return hash((id(self.variable), self.name))

    def __eq__(self, other: object) -> bool:
        # The `==` of Keras' variables compares values.
        return (
            isinstance(other, VariableKey)
            and self.variable is other.variable
            and self.name == other.name
        )


Key = str | VariableKey


@dataclasses.dataclass(frozen=True)
class Kept:
    """A variable that a checkpoint saves.

    Attributes:
        variable: The variable. If it was created under a strategy, it is saved as a global array, and
            restored on any mesh.
        own_rank: Whether values differ between ranks; they are only restored on a mesh of the same shape.
    """

    variable: Any
    own_rank: bool = False


class KeptState:
    """A state that is saved and restored with a model: of a stage, of a hook, or of the user.

    The states of a model are those passed to `strategy.keep(state)`, and those returned by `kept_states` of
    gradient stages and `fit` hooks. All ranks must have the same states, in the same order. Arrays are saved
    and restored by every checkpoint; `values` only by those of a `Checkpointer`.

    Attributes:
        name: The name of its arrays and values in a checkpoint, unique among the states.
    """

    name: str = ""

    def prepare(self, saved: Collection[Key]) -> None:
        """Called before arrays are read: creates the variables for which a checkpoint has values.

        Args:
            saved: The keys of the arrays in the checkpoint; of those saved for each rank, this rank's.
        """

    def arrays(self) -> Mapping[Key, Kept]:
        """The variables to save or to restore."""
        return {}

    def missing(self, keys: Sequence[Key]) -> None:
        """Called after reading, with the keys of variables that were not restored.

        Args:
            keys: The keys of `arrays` that the checkpoint lacks, or has in a different shape.
        """

    def values(self, *, in_epoch: bool) -> Any:
        """Other state, saved by the chief: a JSON-serializable value, or None.

        Args:
            in_epoch: Whether the epoch continues after the save.
        """

    def restore(self, values: Any) -> None:
        """Restores a result of `values`; called on every rank, before a batch is drawn.

        Raises:
            ValueError: The values cannot be restored.
        """


def kept_states_of(model: keras.Model, hooks: Sequence[FitHook] | None = None) -> list[KeptState]:
    """The states of a model: those of its strategy, of stages and of hooks, each once.

    Args:
        model: The model.
        hooks: The hooks of the current `fit`; None outside of one.
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
