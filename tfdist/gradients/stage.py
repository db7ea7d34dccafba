"""`GradientStage`: what changes, measures or reduces gradients on their path to the optimizer."""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, ClassVar

import keras

from tfdist.gradients.items import GradientItem
from tfdist.gradients.reduce import reduce_items
from tfdist.mesh import Mesh
from tfdist.sharding.kept import KeptState
from tfdist.step.context import DistributedStrategy, ReplicaContext
from tfdist.step.hooks import active_hooks
from tfdist.step.keras_step import KerasStep


class Position(enum.Enum):
    """Where on the path a stage is called."""

    #: Each micro-step, after the gradients were weighted by the rank's share of the samples.
    LOCAL = enum.auto()
    #: Once per reduction, in place of the default one.
    REDUCE = enum.auto()
    #: After each reduction.
    REDUCED = enum.auto()
    #: Once per update, after accumulation and before clipping; before the reduction, where gradients are
    #: accumulated before they are reduced (ZeRO 0 and 1).
    UPDATE = enum.auto()


@dataclasses.dataclass(frozen=True, eq=False)
class GradientContext:
    """What a stage knows beside the gradients.

    Attributes:
        optimizer: The optimizer that they are for.
        strategy: The strategy.
        step: The Keras step under way; None outside of one.
        name: What collectives serve, for messages.
    """

    optimizer: Any
    strategy: DistributedStrategy
    step: KerasStep | None
    name: str = "gradients"

    def reduce(self, items: Sequence[GradientItem]) -> list:
        """Whole reduced gradients, by the default buckets, in the order of the items."""
        options = self.strategy.gradient_options
        return reduce_items(items, options, whole=True, name=self.name)


class GradientStage(abc.ABC):
    """Called at one of four positions of the path of gradients.

    A stage of REDUCE gets, once per reduction, all items that it claims, possibly of several groups, and
    also none. It returns whole reduced gradients, of which the path takes shards. Others get all
    gradients, in the order of the variables, and return as many.

    Stages of one position run in the order in which the strategy was given them; those of hooks follow.
    They are called once per trace, or in each step under `run_eagerly`, and after accumulation they are
    traced inside `tf.cond`: so they use operations of TensorFlow alone, and keep what they remember in
    variables.

    Attributes:
        position: Where it is called.
    """

    position: ClassVar[Position]

    def check(self, *, mesh: Mesh, zero_stage: int, optimizer) -> None:
        """Raises ValueError where the stage cannot be used; called before the first step."""

    def claims(self, item: GradientItem) -> bool:
        """Whether this stage of REDUCE reduces a gradient."""
        del item
        return False

    def kept_states(self, model: keras.Model) -> Sequence[KeptState]:
        """What checkpoints of a model save and restore of this stage."""
        del model
        return ()

    @abc.abstractmethod
    def __call__(self, items: Sequence[GradientItem], context: GradientContext) -> Sequence:
        """New gradients, in the order of the items."""


class Stages:
    """The stages of one path.

    Args:
        replica: The replica context.
        optimizer: The optimizer.

    Raises:
        ValueError: A stage cannot be used with it.
    """

    def __init__(self, replica: ReplicaContext, optimizer):
        strategy, step = replica.strategy, replica.step
        hooks = strategy.fit_hooks if step is None else active_hooks(step.model)
        self._context = GradientContext(optimizer, strategy, step)
        self._stages: list[GradientStage] = [
            *strategy.gradient_stages,
            *(stage for hook in hooks for stage in hook.gradient_stages),
        ]
        for stage in self._stages:
            stage.check(mesh=strategy.mesh, zero_stage=strategy.zero_stage, optimizer=optimizer)

    def through(self, position: Position, items: Sequence[GradientItem]) -> list:
        """The gradients of all items, behind the stages of a position."""
        found = [item.gradient for item in items]
        places = [p for p, item in enumerate(items) if item.is_gradient]
        for stage in self._stages:
            if stage.position is position:
                given = [items[p].with_gradient(found[p]) for p in places]
                for place, gradient in zip(places, stage(given, self._context), strict=True):
                    found[place] = gradient
        return found

    def reduced(self, items: Sequence[GradientItem]) -> dict[int, Any]:
        """What stages of REDUCE make of the items that they claim, whole, by place."""
        found: dict[int, Any] = {}
        for stage in self._stages:
            if stage.position is Position.REDUCE:
                claimed = [
                    p
                    for p, item in enumerate(items)
                    if p not in found and not item.is_reduced and stage.claims(item)
                ]
                new = stage([items[p] for p in claimed], self._context)
                found |= dict(zip(claimed, new, strict=True))
        return found
