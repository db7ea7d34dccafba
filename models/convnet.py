"""A small convolutional network for small images, such as those of digits."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from tfdist.utils import checks


def convnet(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    filters: Sequence[int] = (32, 64),
    width: int = 128,
    dropout: float = 0.25,
    name: str = "convnet",
) -> keras.Model:
    """Returns a model of blocks of two convolutions and a pooling, a hidden layer, and logits.

    Batch statistics are those of the global batch (`synchronized=True`), so the network trains
    identically on any number of ranks.

    Args:
        input_shape: Height, width and channels of an image.
        num_classes: The number of logits.
        filters: The number of filters of each block; the image halves after each.
        width: The width of the hidden layer.
        dropout: The fraction of its activations that are dropped.
        name: The model's name.

    Raises:
        ValueError: A size is not positive, `dropout` is not a fraction, or the image is too small.
    """
    input_shape = checks.integers("input_shape", input_shape, minimum=1)
    num_classes = checks.integer("num_classes", num_classes, minimum=1)
    filters = checks.integers("filters", filters, minimum=1, empty=True)
    width = checks.integer("width", width, minimum=1)
    dropout = checks.number("dropout", dropout, minimum=0, maximum=1)
    checks.text("name", name)
    if len(input_shape) != 3 or min(input_shape[:2]) < 2 ** len(filters):
        raise checks.refuse(
            "input_shape",
            input_shape,
            f"height, width and channels, the first two at least {2 ** len(filters)}, because each of "
            f"the {len(filters)} blocks halves them",
        )
    layers = keras.layers
    inputs = x = keras.Input(input_shape, name="image")
    for block, count in enumerate(filters):
        for half in ("a", "b"):
            tag = f"{block}{half}"
            # The normalization that follows includes an offset.
            x = layers.Conv2D(count, 3, padding="same", use_bias=False, name=f"conv_{tag}")(x)
            # Moving averages that converge within tens of steps, which small datasets have.
            x = layers.BatchNormalization(momentum=0.9, synchronized=True, name=f"norm_{tag}")(x)
            x = layers.ReLU(name=f"relu_{tag}")(x)
        x = layers.MaxPooling2D(name=f"pool_{block}")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(width, activation="relu", name="hidden")(x)
    if dropout:
        x = layers.Dropout(dropout, name="dropout")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits")(x), name=name)
