"""Ranks that train apart for some steps: which of them still reduce gradients at every step.

Under an optimizer of `tfdist.addons.slow_links.local_sgd` a rank's gradient is that of its own rows. What still has to
be reduced at every step is what ranks compute together: over a context axis, inside of a host where
the optimizer is to do so. All rooms ask here for the ranks that a rank stays in step with.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from tfdist.backend.keras.attributes import own_variables
from tfdist.collectives import Group
from tfdist.collectives.engine import Engine


class LocalSteps(abc.ABC):
    """An optimizer under which the ranks of the data axis step apart, and meet every so many steps."""

    @abc.abstractmethod
    def in_step(self, engine: Engine) -> frozenset[int]:
        """The ranks that this one stays in step with, itself among them.

        Args:
            engine: The engine, which knows the mesh. All ranks call this at the same time.
        """

    @property
    @abc.abstractmethod
    def is_apart(self) -> bool:
        """Whether ranks have stepped since they last met, so that parameters may differ."""

    @abc.abstractmethod
    def note_parameters(self) -> None:
        """Called before each step: notes the parameters as global, if ranks have just met."""

    @abc.abstractmethod
    def begin_scaled_step(self) -> None:
        """Called before each step by a loss scale around the optimizer, which may leave it out.

        Such a step counts on the way to the next sync all the same.
        """

    @abc.abstractmethod
    def mark_local(self, variables: Sequence) -> None:
        """Notes in their layouts that variables are each rank's own."""

    @property
    @abc.abstractmethod
    def global_variables(self) -> list[tuple[Any, Any]]:
        """Each trained variable, and the one with its value at the last sync."""

    @abc.abstractmethod
    def global_parameters(self) -> contextlib.AbstractContextManager:
        """Inside, trained variables have the values that ranks have agreed on last. Eager only."""

    @abc.abstractmethod
    def restart(self) -> None:
        """Goes back to the parameters that ranks have agreed on last, and counts steps anew."""

    @property
    @abc.abstractmethod
    def is_resumed(self) -> bool:
        """Whether a checkpoint has given this rank what is its own, since the last `restart`."""

    @abc.abstractmethod
    def resume(self, *, own: bool) -> None:
        """Called when a checkpoint was read.

        Args:
            own: Whether it has what is this rank's own. Else ranks go on from what they had agreed on.
        """


def optimizers_in(optimizer: Any) -> Iterator[Any]:
    """An optimizer, and those that it wraps, the outermost first."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def local_optimizer(model: Any) -> LocalSteps | None:
    """The optimizer of a model under which ranks step apart, if it has such a one.

    Raises:
        ValueError: The model has several, or others beside it: a step has one set of ranks that
            reduce its gradients.
    """
    held = [getattr(model, "optimizer", None), *vars(model).values()]
    found: dict[int, Any] = {}
    others = 0
    for each in held:
        if id(each) in found or not hasattr(type(each), "apply_gradients"):
            continue
        around: list = []
        for one in optimizers_in(each):
            if isinstance(one, LocalSteps):
                found[id(each)] = one
                # What wraps it has a state of this rank's own, too.
                one.mark_local([v for wrapper in around for v in own_variables(wrapper)])
                break
            around.append(one)
        else:
            others += 1
    if not found:
        return None
    if len(found) > 1 or others:
        raise ValueError(
            "A model that trains with one of `tfdist.addons.slow_links.local_sgd` has no other optimizer: the losses "
            f"of a step are of one set of rows. Received: {len(found) + others} optimizers in "
            f"`{getattr(model, 'name', model)}`."
        )
    return next(iter(found.values()))


def group_in_step(group: Group, ranks: frozenset[int] | None) -> Group:
    """Those of a group's ranks that are among some.

    Args:
        group: A group of this rank.
        ranks: Ranks of the world, this one among them; None for all.
    """
    return group if ranks is None else group.engine.subgroup(group, ranks)
