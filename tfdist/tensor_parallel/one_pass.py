"""Stock layers of a split model that the compiled library computes in one pass.

All tensor ranks repeat layer normalizations, and an activation takes as many passes over memory on a rank's
units as on all: what they take is not divided by the ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import keras

from tfdist.backend.keras.private import all_layers
from tfdist.layers.activations import gelu
from tfdist.layers.normalization import normalized_in_one_pass
from tfdist.tensor_parallel.adapters import override

#: As Keras registers it: KerasHub's GELU by tanh, a function of its own.
_TANH_GELU = "keras_hub>gelu_approximate"


def activation_of(layer: keras.layers.Layer) -> Callable | None:
    """What a layer applies to its products; the GELU of KerasHub in few passes."""
    activation = layer.activation
    # Of other objects, as layers, Keras knows no name.
    if (
        inspect.isfunction(activation)
        and keras.saving.get_registered_name(activation) == _TANH_GELU
    ):
        return gelu
    return activation


def normalize_in_one_pass(model: keras.Model) -> None:
    """Has Keras' layer normalizations over the last dim take the library's kernel in steps on CPUs."""
    for layer in all_layers(model):
        # Of a subclass nobody knows what it computes.
        is_stock = type(layer) is keras.layers.LayerNormalization
        if is_stock and layer.axis in (-1, [-1]) and not layer.rms_scaling:
            override(layer, "call", _in_one_pass(layer, layer.call))


def _in_one_pass(layer: keras.layers.Layer, stock: Callable) -> Callable:
    def call(inputs):
        found = normalized_in_one_pass(layer, inputs)
        return stock(inputs) if found is None else found

    return call
