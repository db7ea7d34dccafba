"""The states of layers that depend on past batches, such as moving averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import accumulators, micro_steps, own_non_trainable
from tfdist.backend.keras.functional import is_deferred
from tfdist.backend.keras.private import all_layers
from tfdist.collectives import Group, all_reduce
from tfdist.sharding.layout import layout_of
from tfdist.sharding.parts import flattened, unflattened
from tfdist.step.context import strategy_of
from tfdist.step.local_steps import all_optimizers, local_optimizer


def layer_states(model: keras.Model, *, of_own_rows: bool = False) -> list[keras.Variable]:
    """The floating variables that layers update themselves, without frozen weights.

    Args:
        model: The model.
        of_own_rows: Whether to return only those that depend on the rows of this rank alone.
    """
    return [
        variable
        for layer in all_layers(model)
        if not (of_own_rows and _is_same_on_all_ranks(layer))
        for variable in own_non_trainable(layer)
        if keras.backend.is_float_dtype(variable.dtype)
        and not (of_own_rows and layout_of(variable).same_on_all_ranks)
    ]


def average_states(states: Sequence[keras.Variable], group: Group) -> None:
    """Averages the states of layers over ranks with different batches.

    Args:
        states: The result of `layer_states`.
        group: The ranks.
    """
    # Variables of other stages have no values here.
    states = [state for state in states if not is_deferred(state)]
    if group.size == 1 or not states:
        return
    wire = tf.float64 if any(state.dtype == "float64" for state in states) else tf.float32
    values = [tf.cast(tf.convert_to_tensor(state.value), wire) for state in states]
    flat = flattened(values)
    extremes = all_reduce(tf.stack([flat, -flat]), group, "max", name="layer-states/extremes")
    # Equal values must stay equal bit for bit; a mean would round them.
    mean = all_reduce(flat, group, "mean", name="layer-states")
    flat = tf.where(extremes[0] == -extremes[1], flat, mean)
    for state, value in zip(states, unflattened(flat, values), strict=True):
        state.assign(value)


def average_accumulated(model: Any) -> None:
    """Averages the gradients of a part of an update, which each rank accumulates from its own rows.

    The update takes their mean over the ranks, so that it stays the same. Others than this rank's may be saved.
    """
    strategy = strategy_of(model)
    if strategy is None or strategy.zero_stage >= 2 or local_optimizer(model) is not None:
        return  # Ranks accumulate reduced gradients, or their own.
    for optimizer in all_optimizers(model):
        steps = getattr(optimizer, "gradient_accumulation_steps", None)
        if steps and optimizer.built and int(micro_steps(optimizer).numpy()) % steps:
            # Separately: together they may take as much memory as the model.
            for each in accumulators(optimizer):
                layout = layout_of(each)
                more = () if layout.partial_over is None else layout.partial_over.axes
                axes = (*layout.gradient_axes(strategy.mesh), *more)
                average_states([each], strategy.group(*axes))


def _is_same_on_all_ranks(layer: keras.Layer) -> bool:
    if isinstance(layer, keras.layers.SpectralNormalization):
        return True  # Its state depends only on its kernel.
    return isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
