"""Optimizers that look at each entry of a parameter alone.

Only these give the single process's update where a rank holds a slice of a parameter. One that
takes a norm or a mean over a whole parameter (Lamb, Adafactor, Muon) does not.
"""

from __future__ import annotations

import keras

from tfdist.sharding.updates import unwrapped

_ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
)


def is_elementwise(optimizer) -> bool:
    """Whether an optimizer's update of an entry depends on that entry's gradient and state alone.

    An optimizer of one's own says so by an attribute `elementwise = True`.
    """
    optimizer = unwrapped(optimizer)
    if getattr(optimizer, "elementwise", False):
        return True
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return all(map(is_elementwise, optimizer.optimizers))
    for kind in _ELEMENTWISE:
        if isinstance(optimizer, kind) and type(optimizer).update_step is kind.update_step:
            return True
    return False


def check_elementwise(optimizer) -> None:
    """Raises for an optimizer that cannot update slices.

    Raises:
        ValueError: The optimizer is not known to be elementwise.
    """
    if not is_elementwise(optimizer):
        names = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
        raise ValueError(
            "Where ranks hold slices of parameters, the optimizer updates each entry by itself: "
            f"{names}, or one of your own with the attribute `elementwise = True`. Received: "
            f"{type(optimizer).__name__}."
        )
