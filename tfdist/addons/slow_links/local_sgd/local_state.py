"""The state of an optimizer of local steps, and helpers for values and conditions in graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives.engine import Engine
from tfdist.step.context import DistributedStrategy


@dataclasses.dataclass
class LocalState:
    """The state of an optimizer, in a separate object, since Keras and TensorFlow wrap attributes.

    Attributes:
        steps: The number of steps since the last sync.
        slots: By name, a variable for each trained one.
        strategy: The strategy of the optimizer.
        ranks: An engine, and the result of `in_step` for it.
        trained: The variables that it trains.
        is_scaled: Whether a loss scale around it begins and ends steps.
        is_resumed: Whether a checkpoint has restored this rank's own state.
        shows_global: Whether variables have the global parameters now.
    """

    steps: Any = None
    slots: dict[str, list] = dataclasses.field(default_factory=dict)
    strategy: DistributedStrategy | None = None
    ranks: tuple[Engine, frozenset[int]] | None = None
    trained: list = dataclasses.field(default_factory=list)
    is_scaled: bool = False
    is_resumed: bool = False
    shows_global: bool = False


def value_of(variable) -> tf.Tensor:
    """The value of a Keras variable, as a tensor of TensorFlow."""
    return tf.convert_to_tensor(variable.value)


def when(condition: tf.Tensor, function: Callable[[], None]) -> None:
    """Calls a function if a condition holds, which may be known only at run time."""

    def call():
        function()
        return tf.constant(True)

    tf.cond(condition, call, lambda: tf.constant(False))
