"""`GradientStage`: changes, measures or reduces gradients on their path to the optimizer."""

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
from tfdist.utils.places import replace_at


class Position(enum.Enum):
    """The position on the path at which a stage is called."""

    #: In each micro-step, after the gradients were weighted by the rank's share of the samples.
    LOCAL = enum.auto()
    #: Once per reduction, in place of the default reduction.
    REDUCE = enum.auto()
    #: After each reduction.
    REDUCED = enum.auto()
    #: Once per update, after accumulation and before clipping; before the reduction if gradients are
    #: accumulated before they are reduced (ZeRO 0 and 1).
    UPDATE = enum.auto()


@dataclasses.dataclass(frozen=True, eq=False)
class GradientContext:
    """The context of a call of a stage.

    Attributes:
        optimizer: The optimizer that receives the gradients.
        strategy: The strategy.
        step: The current Keras step; None outside a step.
        name: The name of collectives, for messages.
    """

    optimizer: Any
    strategy: DistributedStrategy
    step: KerasStep | None
    name: str = "gradients"

    def reduce(self, items: Sequence[GradientItem]) -> list:
        """Whole gradients, reduced in the default buckets, in the order of the items."""
        options = self.strategy.gradient_options
        return reduce_items(items, options, whole=True, name=self.name)


class GradientStage(abc.ABC):
    """Called at one of four positions on the path of gradients.

    A stage of REDUCE receives, once per reduction, all items that it claims, which may be of several
    groups, or none. It returns whole reduced gradients, and the path extracts the shards. Other stages
    receive all gradients, in the order of the variables, and return the same number.

    Stages of one position run in the order in which they were passed to the strategy, followed by those of
    hooks. They are called once per trace, or in each step under `run_eagerly`, and after accumulation they
    are traced inside `tf.cond`. So they may only use TensorFlow operations, and must store state in
    variables.

    Attributes:
        position: The position at which it is called.
    """

    position: ClassVar[Position]

    def check(self, *, mesh: Mesh, zero_stage: int, optimizer) -> None:
        """Raises ValueError if the stage cannot be used; called before the first step."""

    def claims(self, item: GradientItem) -> bool:
        """Whether this stage of REDUCE reduces a gradient."""
        return False

    def kept_states(self, model: keras.Model) -> Sequence[KeptState]:
        """The states of this stage that checkpoints of a model save and restore."""
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
        ValueError: A stage cannot be used with the optimizer.
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
        """The gradients of all items, after the stages of a position."""
        found = [item.gradient for item in items]
        places = [p for p, item in enumerate(items) if item.is_gradient]
        for stage in self._stages:
            if stage.position is position:
                given = [items[p].with_gradient(found[p]) for p in places]
                replace_at(found, places, stage(given, self._context))
        return found

    def reduced(self, items: Sequence[GradientItem]) -> dict[int, Any]:
        """The whole gradients that stages of REDUCE return for the items that they claim, by place."""
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
