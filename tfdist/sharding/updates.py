"""Whether an optimizer's update depends on the rows of a sparse gradient, or only on their sum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

#: Optimizers that treat a sparse gradient as the equivalent dense one.
_OF_SUMS = (keras.optimizers.SGD, keras.optimizers.Lion)


def unwrapped(optimizer):
    """The optimizer inside any loss scale optimizers."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def updates_as(optimizer, kinds: Iterable[Any]) -> bool:
    """Whether an optimizer has the `update_step` of one of some classes."""
    return any(
        isinstance(optimizer, kind) and type(optimizer).update_step is kind.update_step
        for kind in kinds
    )


def needs_rows(optimizer) -> bool:
    """Whether an optimizer's update depends on the rows of a sparse gradient, and not only on their sum.

    Keras clips rows separately, and computes the norm over them. Where it accumulates gradients, it adds
    rows up itself.
    """
    optimizer = unwrapped(optimizer)
    if optimizer.gradient_accumulation_steps:
        return False
    if optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue:
        return True
    return not updates_as(optimizer, _OF_SUMS)
