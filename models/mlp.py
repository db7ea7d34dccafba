"""A multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from tfdist.utils import checks


def mlp(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    widths: Sequence[int] = (256, 128),
    dropout: float = 0.0,
    name: str = "mlp",
) -> keras.Model:
    """Returns a model of fully connected layers with ReLU, and logits.

    Args:
        input_shape: The shape of one sample, flattened by the model.
        num_classes: The number of logits.
        widths: The width of each hidden layer.
        dropout: The fraction of activations that are dropped after each hidden layer.
        name: The model's name.

    Raises:
        ValueError: A size is not positive, or `dropout` is not a fraction.
    """
    input_shape = checks.integers("input_shape", input_shape, minimum=1)
    num_classes = checks.integer("num_classes", num_classes, minimum=1)
    widths = checks.integers("widths", widths, minimum=1, empty=True)
    dropout = checks.number("dropout", dropout, minimum=0, maximum=1)
    checks.text("name", name)
    inputs = x = keras.Input(input_shape, name="features")
    x = keras.layers.Flatten(name="flatten")(x)
    for number, width in enumerate(widths):
        x = keras.layers.Dense(width, activation="relu", name=f"hidden_{number}")(x)
        if dropout:
            x = keras.layers.Dropout(dropout, name=f"dropout_{number}")(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes, name="logits")(x), name=name)
