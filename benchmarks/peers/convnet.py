"""The ConvNet of all kinds of Keras, which build it of layers of the same names."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any


def convnet(keras: ModuleType, sizes: Mapping[str, int]) -> Any:
    """Two blocks of two convolutions, a hidden layer and logits; `keras` is Keras 3 or tf_keras."""
    layers = keras.layers
    model = keras.Sequential([layers.Input((sizes["side"], sizes["side"], 3))])
    for filters in (32, 64):
        for _ in range(2):
            model.add(layers.Conv2D(filters, 3, padding="same", use_bias=False))
            model.add(layers.BatchNormalization(momentum=0.9))
            model.add(layers.ReLU())
        model.add(layers.MaxPooling2D())
    for layer in (
        layers.Flatten(),
        layers.Dense(128, activation="relu"),
        layers.Dropout(0.25),
        layers.Dense(sizes["classes"]),
    ):
        model.add(layer)
    return model
