"""What an optimizer's update looks at: the rows of a sparse gradient, or only their sum."""

from __future__ import annotations

import keras

#: Optimizers to which a sparse gradient is the dense one that it adds up to.
_OF_SUMS = (keras.optimizers.SGD, keras.optimizers.Lion)


def unwrapped(optimizer):
    """The optimizer that updates, without the loss scales around it."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def needs_rows(optimizer) -> bool:
    """Whether an optimizer's update depends on the rows of a sparse gradient, and not on their sum.

    Keras clips rows one by one, and takes the norm over them. Where it accumulates gradients it adds
    rows up itself.
    """
    optimizer = unwrapped(optimizer)
    if optimizer.gradient_accumulation_steps:
        return False
    if optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue:
        return True
    return not any(
        isinstance(optimizer, kind) and type(optimizer).update_step is kind.update_step
        for kind in _OF_SUMS
    )
