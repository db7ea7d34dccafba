"""Checks of the inner optimizer of local steps, and of the model that it trains."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from tfdist.sharding.layout import layout_of
from tfdist.step.context import DistributedStrategy
from tfdist.step.local_steps import LocalSteps, optimizers_in
from tfdist.utils import checks


def checked_inner(inner) -> keras.optimizers.Optimizer:
    """The optimizer of the local steps.

    Raises:
        TypeError: `inner` is not an optimizer.
        ValueError: It is not supported as an inner optimizer.
    """
    if isinstance(inner, str):
        try:
            inner = keras.optimizers.get(inner)
        except ValueError as error:
            raise checks.refuse("inner", inner, "the name of an optimizer of Keras") from error
    checks.instance("inner", inner, keras.optimizers.Optimizer, "a Keras optimizer, or its name")
    if isinstance(inner, LocalSteps) or len(list(optimizers_in(inner))) > 1:
        raise checks.refuse(
            "inner", inner, "an optimizer that wraps no other; a loss scale must wrap this one"
        )
    if inner.use_ema:
        raise ValueError(
            "An `inner` optimizer with use_ema=True is not supported: parameters are averaged at syncs. "
            f"Received: {type(inner).__name__} with use_ema=True. Remove use_ema."
        )
    return inner


def check_layouts(strategy: DistributedStrategy, variables: Sequence) -> None:
    """Checks that no state is sharded over ranks that have separate parameters between syncs."""
    if strategy.zero_stage:
        raise ValueError(
            "ZeRO cannot shard state that differs between ranks: local optimizers require zero_stage=0. "
            f"Received: zero_stage={strategy.zero_stage}. Remove `zero_stage`, and split models that are "
            "too large over the tensor or the pipeline axis."
        )
    apart = set(strategy.mesh.replica_axes)
    for variable in variables:
        part = layout_of(variable).slice
        if part is not None and apart & set(part.group.axes):
            raise ValueError(
                f"`{variable.path}` cannot be split over the {'+'.join(part.group.axes)} axis: ranks along "
                "it have separate parameters between two syncs. Split it over another axis, or "
                "train without a local optimizer."
            )
