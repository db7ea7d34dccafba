"""One small member of each family of `keras.applications`, trained for two steps."""

from __future__ import annotations

import functools

import keras
import numpy as np

from tests.parity.feeding import Feed, Result, rng, scope, start

__all__ = ["APPLICATIONS", "train_application"]

#: The smallest pictures that a family takes, where 64 pixels are too few.
APPLICATIONS = {
    "ConvNeXtTiny": 64,
    "DenseNet121": 64,
    "EfficientNetB0": 64,
    "EfficientNetV2B0": 64,
    "InceptionResNetV2": 75,
    "InceptionV3": 75,
    "MobileNet": 64,
    "MobileNetV2": 64,
    "MobileNetV3Small": 64,
    "NASNetMobile": 64,
    "ResNet50": 64,
    "ResNet50V2": 64,
    "VGG16": 64,
    "VGG19": 64,
    "Xception": 71,
}


def without_chance(layer, synchronized: bool):
    """The layer, without dropout of units or paths, its statistics those of the global batch."""
    config = layer.get_config()
    for name in ("rate", "drop_path_rate"):
        if name in config:
            config[name] = 0.0
    if isinstance(layer, keras.layers.BatchNormalization):
        config["synchronized"] = synchronized
    return layer.__class__.from_config(config)


def train_application(strategy, feed: Feed, *, name: str) -> Result:
    """Two steps of SGD on one batch, with the softmax that the family ends with."""
    start()
    pixels = APPLICATIONS[name]
    x = rng().normal(size=(feed.rows, pixels, pixels, 3)).astype("float32")
    y = rng().integers(0, 5, feed.rows)
    with scope(strategy):
        shape = (pixels, pixels, 3)
        model = getattr(keras.applications, name)(weights=None, classes=5, input_shape=shape)
        # In one process the batch is whole, and Keras' formula for what is not synchronized the more
        # exact one.
        rule = functools.partial(without_chance, synchronized=strategy is not None)
        model = keras.models.clone_model(model, clone_function=rule)
        model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
    history = feed.fit(model, x, y)
    weights = {f"{i}/{w.path}": np.asarray(w) for i, w in enumerate(model.weights)}
    return Result(weights, history.history, {}, [])
