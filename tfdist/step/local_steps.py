"""Local steps: ranks that train separately, and those that still reduce gradients at every step.

Under an optimizer of `tfdist.addons.slow_links.local_sgd` a rank uses the gradient of its own rows. Ranks that
compute together still reduce gradients at every step: those of a context axis and, if the optimizer is so
configured, those of a host.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from tfdist.backend.keras.attributes import own_variables
from tfdist.collectives import Group
from tfdist.collectives.engine import Engine


class LocalSteps(abc.ABC):
    """An optimizer under which the ranks of the data axis take local steps, and synchronize periodically."""

    @abc.abstractmethod
    def in_step(self, engine: Engine) -> frozenset[int]:
        """The ranks that take each step together with this one, including itself.

        Args:
            engine: The engine. All ranks must call this at the same time.
        """

    @property
    @abc.abstractmethod
    def is_apart(self) -> bool:
        """Whether ranks have taken steps since the last synchronization, so that parameters may differ."""

    @abc.abstractmethod
    def note_parameters(self) -> None:
        """Called before each step: records the parameters as global right after a synchronization."""

    @abc.abstractmethod
    def begin_scaled_step(self) -> None:
        """Called before each step by a loss scale optimizer around this one, which may skip the step.

        A skipped step also counts towards the next synchronization.
        """

    @abc.abstractmethod
    def mark_local(self, variables: Sequence) -> None:
        """Records in the layouts of variables that their values differ between ranks."""

    @property
    @abc.abstractmethod
    def global_variables(self) -> list[tuple[Any, Any]]:
        """Each trained variable, and the variable with its value at the last synchronization."""

    @abc.abstractmethod
    def global_parameters(self) -> contextlib.AbstractContextManager:
        """A context in which trained variables have their last synchronized values. Eager only."""

    @abc.abstractmethod
    def restart(self) -> None:
        """Returns to the last synchronized parameters, and resets the count of steps."""

    @property
    @abc.abstractmethod
    def is_resumed(self) -> bool:
        """Whether a checkpoint has restored the state of this rank since the last `restart`."""

    @abc.abstractmethod
    def resume(self, *, own: bool) -> None:
        """Called when a checkpoint was read.

        Args:
            own: Whether it contains the state of this rank. Otherwise ranks continue from the last
                synchronized parameters.
        """


def optimizers_in(optimizer: Any) -> Iterator[Any]:
    """An optimizer and the optimizers that it wraps, the outermost first."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def local_optimizer(model: Any) -> LocalSteps | None:
    """The optimizer of a model under which ranks take local steps, if there is one.

    Raises:
        ValueError: The model has another optimizer, too: all gradients of a step are reduced over the same
            ranks.
    """
    held, found = held_optimizers(model), None
    for each in held.values():
        around: list = []
        for one in optimizers_in(each):
            if isinstance(one, LocalSteps):
                found = one
                # The state of optimizers around it differs between ranks, too.
                one.mark_local([v for wrapper in around for v in own_variables(wrapper)])
                break
            around.append(one)
    if found is not None and len(held) > 1:
        raise ValueError(
            "A model with an optimizer of `tfdist.addons.slow_links.local_sgd` cannot have another optimizer: "
            "the losses of a step must be of the same rows. Received: "
            f"{len(held)} optimizers in `{getattr(model, 'name', model)}`."
        )
    return found


def global_parameters(model: Any) -> contextlib.AbstractContextManager:
    """A context in which a model that trains with local steps has its last synchronized parameters.

    This model is evaluated, used for predictions, saved, and visible to callbacks at the end of an epoch.
    """
    local = local_optimizer(model) if isinstance(model, keras.Model) else None
    return contextlib.nullcontext() if local is None else local.global_parameters()


def held_optimizers(model: Any) -> dict[str, Any]:
    """The optimizers that are attributes of a model and that no other one wraps, each once.

    Returns:
        "optimizer": the model's own; "optimizer/<attribute>": another one.
    """
    found: dict[int, tuple[str, Any]] = {}
    others = ((f"optimizer/{name}", each) for name, each in vars(model).items())
    for name, each in (("optimizer", getattr(model, "optimizer", None)), *others):
        if hasattr(type(each), "apply_gradients"):
            found.setdefault(id(each), (name, each))
    wrapped = {id(one) for _, each in found.values() for one in [*optimizers_in(each)][1:]}
    return {name: each for name, each in found.values() if id(each) not in wrapped}


def all_optimizers(model: Any) -> list:
    """The optimizers that are attributes of a model, those that they wrap, and those of a MultiOptimizer."""
    held = [one for each in held_optimizers(model).values() for one in optimizers_in(each)]
    return held + [one for each in held for one in getattr(each, "optimizers", ())]


def group_in_step(group: Group, ranks: frozenset[int] | None) -> Group:
    """The subgroup of a group with the ranks that step together.

    Args:
        group: A group of this rank.
        ranks: The ranks that step together, including this one; None for all.
    """
    return group if ranks is None else group.engine.subgroup(group, ranks)
