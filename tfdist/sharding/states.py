"""What layers keep of the batches that they saw."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import own_non_trainable
from tfdist.backend.keras.functional import without_values
from tfdist.backend.keras.private import all_layers
from tfdist.collectives import Group, all_reduce
from tfdist.sharding.layout import layout_of


def layer_states(model: keras.Model, *, of_own_rows: bool = False) -> list[keras.Variable]:
    """Floating variables that layers keep for themselves, frozen weights not among them.

    Args:
        model: The model.
        of_own_rows: Whether only those that follow this rank's rows: not what all ranks' rows move,
            or none do.
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
    """Averages what layers keep, over ranks that saw other batches.

    Args:
        states: Floating variables, as of `layer_states`.
        group: The ranks.
    """
    # Those of other stages have no values here.
    states = [state for state in states if not without_values(state)]
    if group.size == 1 or not states:
        return
    values = [tf.cast(tf.convert_to_tensor(state.value), tf.float32) for state in states]
    flat = tf.concat([tf.reshape(value, [-1]) for value in values], axis=0)
    extremes = all_reduce(tf.stack([flat, -flat]), group, "max", name="layer-states/extremes")
    # What is equal everywhere stays so bit for bit; a mean would round it.
    mean = all_reduce(flat, group, "mean", name="layer-states")
    flat = tf.where(extremes[0] == -extremes[1], flat, mean)
    parts = tf.split(flat, [value.shape.num_elements() for value in values])
    for state, part, value in zip(states, parts, values, strict=True):
        state.assign(tf.reshape(part, value.shape))


def _is_same_on_all_ranks(layer: keras.Layer) -> bool:
    if isinstance(layer, keras.layers.SpectralNormalization):
        return True  # Its state follows its kernel.
    return isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
