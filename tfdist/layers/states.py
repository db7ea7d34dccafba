"""What layers keep of the batches that they saw."""

from __future__ import annotations

import keras

from tfdist.keras_internals.attributes import own_non_trainable
from tfdist.keras_internals.private import all_layers
from tfdist.layers.experts import MixtureOfExperts

__all__ = ["layer_states"]


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
    ]


def _is_same_on_all_ranks(layer: keras.Layer) -> bool:
    # The first counts all ranks' tokens, the second follows its kernel.
    if isinstance(layer, MixtureOfExperts | keras.layers.SpectralNormalization):
        return True
    return isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized
