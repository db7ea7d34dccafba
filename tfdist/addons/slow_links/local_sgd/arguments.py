"""What an optimizer of local steps can be put around, and which models it can train."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from tfdist.sharding.layout import layout_of
from tfdist.step.context import DistributedStrategy
from tfdist.step.local_steps import LocalSteps, optimizers_in
from tfdist.utils import checks


def checked_inner(inner) -> keras.optimizers.Optimizer:
    """The optimizer of the local steps; raises for what cannot be one."""
    if isinstance(inner, str):
        try:
            inner = keras.optimizers.get(inner)
        except ValueError as error:
            raise checks.refuse("inner", inner, "the name of an optimizer of Keras") from error
    checks.instance("inner", inner, keras.optimizers.Optimizer, "a Keras optimizer, or its name")
    if isinstance(inner, LocalSteps) or len(list(optimizers_in(inner))) > 1:
        raise checks.refuse(
            "inner", inner, "an optimizer that wraps no other; a loss scale goes around this one"
        )
    if inner.use_ema:
        raise ValueError(
            "The weights that ranks agree on are an average over time already. Received: an `inner` "
            f"{type(inner).__name__} with use_ema=True; leave that out."
        )
    return inner


def check_layouts(strategy: DistributedStrategy, variables: Sequence) -> None:
    """Refuses what ranks that step apart cannot share."""
    if strategy.zero_stage:
        raise ValueError(
            "ZeRO divides among the data parallel ranks what each of them has for itself between two "
            f"syncs. Received: zero_stage={strategy.zero_stage}. Leave `zero_stage` out, and split "
            "models that are too large over the tensor or the pipeline axis."
        )
    apart = set(strategy.mesh.replica_axes)
    for variable in variables:
        part = layout_of(variable).slice
        if part is not None and apart & set(part.group.axes):
            raise ValueError(
                f"`{variable.path}` is split over the {'+'.join(part.group.axes)} axis, along which "
                "each rank has a model of its own between two syncs. Split it over another axis, or "
                "train with its optimizer alone."
            )
