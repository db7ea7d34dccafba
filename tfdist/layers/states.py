"""What layers keep of the batches that they saw."""

from __future__ import annotations

import keras

__all__ = ["layer_states"]


def layer_states(model: keras.Model) -> list[keras.Variable]:
    """Floating variables that layers keep for themselves, frozen weights not among them."""
    return [
        variable
        for layer in model._flatten_layers()
        for variable in layer._non_trainable_variables
        if keras.backend.is_float_dtype(variable.dtype)
    ]
