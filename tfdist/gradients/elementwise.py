"""Elementwise optimizers, which update each entry of a parameter independently.

Only these give the update of a single process where a rank holds a slice of a parameter. An optimizer
that uses a norm or a mean over a whole parameter (Lamb, Adafactor, Muon) does not; those of the add-on
`optimizers` exchange what they need.
"""

from __future__ import annotations

import keras

from tfdist.sharding.updates import unwrapped, updates_as

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

    A custom optimizer declares it, or that it updates parts like wholes, by an attribute `elementwise = True`.
    """
    optimizer = unwrapped(optimizer)
    if getattr(optimizer, "elementwise", False):
        return True
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return all(map(is_elementwise, optimizer.optimizers))
    return updates_as(optimizer, _ELEMENTWISE)


def check_elementwise(optimizer) -> None:
    """Checks that an optimizer can update slices of parameters.

    Raises:
        ValueError: The optimizer is not known to be elementwise.
    """
    if not is_elementwise(optimizer):
        names = ", ".join(kind.__name__ for kind in _ELEMENTWISE)
        raise ValueError(
            "Where ranks hold slices of parameters, the optimizer must be elementwise: "
            f"{names}, those of `tfdist.addons.optimizers`, or a custom one with the attribute "
            f"`elementwise = True`. Received: {type(optimizer).__name__}."
        )
