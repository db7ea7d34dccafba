"""Stock layers of a split model that the compiled library computes in one pass.

All tensor ranks repeat layer normalizations, and an activation needs the same number of passes over memory
for a rank's units as for all: their time does not decrease with the number of ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import keras

from tfdist.backend.keras.private import all_layers
from tfdist.layers.activations import gelu
from tfdist.layers.normalization import normalized_in_one_pass
from tfdist.tensor_parallel.adapters import override

#: The registered name of KerasHub's GELU by tanh, which is a separate function.
_TANH_GELU = "keras_hub>gelu_approximate"


def activation_of(layer: keras.layers.Layer) -> Callable | None:
    """The activation of a layer; KerasHub's GELU is replaced by one in fewer passes."""
    activation = layer.activation
    # Other objects, such as layers, have no registered name.
    if (
        inspect.isfunction(activation)
        and keras.saving.get_registered_name(activation) == _TANH_GELU
    ):
        return gelu
    return activation


def normalize_in_one_pass(model: keras.Model) -> None:
    """Makes Keras' layer normalizations over the last dim use the library's kernel in steps on CPUs."""
    for layer in all_layers(model):
        # A subclass may compute something else.
        is_stock = type(layer) is keras.layers.LayerNormalization
        if is_stock and layer.axis in (-1, [-1]) and not layer.rms_scaling:
            override(layer, "call", _in_one_pass(layer, layer.call))


def _in_one_pass(layer: keras.layers.Layer, stock: Callable) -> Callable:
    def call(inputs):
        found = normalized_in_one_pass(layer, inputs)
        return stock(inputs) if found is None else found

    return call
