"""Pictures: segmentation, detection, attention over patches, normalizations of all kinds."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers, ops

from tests.parity.feeding import Feed, Result, adam, rng, run, sgd

__all__ = [
    "counting_layer",
    "box_regression",
    "captcha_ctc",
    "capsules_of_norms",
    "frozen_backbone",
    "gradient_centralization",
    "mlp_mixer",
    "residual_convnet",
    "spectral_normalization",
    "u_net",
    "vision_transformer",
    "weighted_segmentation",
]


def pictures(rows: int, channels: int = 1):
    return rng().normal(size=(rows, 8, 8, channels)).astype("float32")


def classes(rows: int, how_many: int = 3):
    return np.random.default_rng(4).integers(0, how_many, rows)


def u_net_model(outputs: str = "softmax"):
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, strides=2, padding="same")(image)
    x = layers.Activation("relu")(layers.BatchNormalization(synchronized=True)(x))
    before = x
    x = layers.SeparableConv2D(6, 3, padding="same")(layers.Activation("relu")(x))
    x = layers.BatchNormalization(synchronized=True)(x)
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    x = layers.Add()([x, layers.Conv2D(6, 1, strides=2, padding="same")(before)])
    x = layers.Conv2DTranspose(4, 3, padding="same")(layers.Activation("relu")(x))
    x = layers.Concatenate()([layers.UpSampling2D(2)(x), before])
    x = layers.UpSampling2D(2)(layers.Conv2D(4, 3, padding="same")(x))
    return keras.Model(image, layers.Conv2D(3, 3, activation=outputs, padding="same")(x))


def u_net(strategy, feed: Feed) -> Result:
    y = rng().integers(0, 3, (feed.rows, 8, 8))
    compiled = lambda: {  # noqa: E731
        "optimizer": adam(),
        "loss": "sparse_categorical_crossentropy",
        "metrics": ["accuracy"],
    }
    return run(strategy, feed, u_net_model, compiled, pictures(feed.rows), y)


def weighted_segmentation(strategy, feed: Feed) -> Result:
    """A weight for each pixel, and the overlap of classes as a metric."""
    random = rng()
    y = random.integers(0, 3, (feed.rows, 8, 8))
    weights = np.array([1.0, 2.0, 0.5], "float32")[y]
    compiled = lambda: {  # noqa: E731
        "optimizer": sgd(),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "weighted_metrics": [keras.metrics.MeanIoU(3, sparse_y_pred=False)],
    }
    return run(
        strategy, feed, lambda: u_net_model("linear"), compiled, pictures(feed.rows), y, weights
    )


def classifier_options(optimizer=sgd, **options):
    return lambda: {
        "optimizer": optimizer(),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        **options,
    }


def residual_convnet(strategy, feed: Feed) -> Result:
    """Group, layer, RMS and synchronized batch normalization in one residual net."""

    def build():
        image = keras.Input((8, 8, 1))
        x = layers.Conv2D(4, 3, padding="same")(image)
        for normalization in (
            layers.GroupNormalization(2),
            layers.LayerNormalization(),
            layers.RMSNormalization(),
            layers.BatchNormalization(synchronized=True, momentum=0.9),
            layers.UnitNormalization(),
        ):
            y = layers.DepthwiseConv2D(3, padding="same")(normalization(x))
            x = layers.Add()([x, layers.Activation("gelu")(y)])
        return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))

    return run(
        strategy, feed, build, classifier_options(adam), pictures(feed.rows), classes(feed.rows)
    )


def spectral_normalization(strategy, feed: Feed) -> Result:
    def build():
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.SpectralNormalization(layers.Conv2D(3, 3, strides=2)),
                layers.LeakyReLU(),
                layers.Flatten(),
                layers.SpectralNormalization(layers.Dense(3), power_iterations=2),
            ]
        )

    return run(strategy, feed, build, classifier_options(), pictures(feed.rows), classes(feed.rows))


class Patches(layers.Layer):
    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def call(self, images):
        patches = ops.image.extract_patches(images, self.size)
        rows, cols, size = patches.shape[1:]
        return ops.reshape(patches, (ops.shape(images)[0], rows * cols, size))


class PatchEncoder(layers.Layer):
    def __init__(self, patches: int, width: int):
        super().__init__()
        self.patches = patches
        self.projection = layers.Dense(width)
        self.position = layers.Embedding(patches, width)

    def call(self, x):
        positions = ops.expand_dims(ops.arange(0, self.patches), axis=0)
        return self.projection(x) + self.position(positions)


def vision_transformer(strategy, feed: Feed) -> Result:
    def build():
        image = keras.Input((8, 8, 1))
        x = PatchEncoder(4, 8)(Patches(4)(layers.Rescaling(0.5)(image)))
        for _ in range(2):
            y = layers.LayerNormalization(epsilon=1e-6)(x)
            x = layers.Add()([layers.MultiHeadAttention(2, 4, dropout=0.0)(y, y), x])
            y = layers.Dense(16, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
            x = layers.Add()([layers.Dense(8)(layers.Dropout(0.0)(y)), x])
        x = layers.Flatten()(layers.LayerNormalization()(x))
        return keras.Model(image, layers.Dense(3)(x))

    optimizer = lambda: keras.optimizers.AdamW(1e-3, weight_decay=1e-4)  # noqa: E731
    return run(
        strategy,
        feed,
        build,
        classifier_options(optimizer),
        pictures(feed.rows),
        classes(feed.rows),
    )


def mlp_mixer(strategy, feed: Feed) -> Result:
    """Dense layers over patches and over channels in turn."""

    def build():
        image = keras.Input((8, 8, 1))
        x = layers.Dense(6)(Patches(4)(image))
        y = layers.Permute((2, 1))(layers.LayerNormalization()(x))
        y = layers.Dense(4, activation="gelu")(y)
        x = layers.Add()([x, layers.Permute((2, 1))(y)])
        return keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))

    return run(strategy, feed, build, classifier_options(), pictures(feed.rows), classes(feed.rows))


def box_regression(strategy, feed: Feed) -> Result:
    """A class and a box, with a loss of the user's own as an object."""

    class GIoU(keras.losses.Loss):
        def call(self, y_true, y_pred):
            low = ops.minimum(y_true[:, :2], y_pred[:, :2])
            high = ops.maximum(y_true[:, 2:], y_pred[:, 2:])
            hull = ops.prod(ops.maximum(high - low, 1e-3), axis=-1)
            return hull + ops.mean(ops.abs(y_true - y_pred), axis=-1)

    def build():
        image = keras.Input((8, 8, 1))
        x = layers.Flatten()(layers.Conv2D(3, 3, activation="relu")(image))
        return keras.Model(
            image,
            [layers.Dense(3, activation="softmax")(x), layers.Dense(4, activation="sigmoid")(x)],
        )

    compiled = lambda: {  # noqa: E731
        "optimizer": sgd(),
        "loss": ["sparse_categorical_crossentropy", GIoU(reduction="sum")],
        "loss_weights": [1.0, 0.1],
    }
    boxes = np.sort(rng().uniform(size=(feed.rows, 4)).astype("float32"), axis=1)
    return run(strategy, feed, build, compiled, pictures(feed.rows), (classes(feed.rows), boxes))


def captcha_ctc(strategy, feed: Feed) -> Result:
    """Characters in a picture: columns as time, a recurrent net, the CTC loss."""

    def build():
        image = keras.Input((8, 8, 1))
        x = layers.Conv2D(3, 3, activation="relu", padding="same")(image)
        x = layers.Reshape((8, 24))(layers.Permute((2, 1, 3))(x))
        x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
        return keras.Model(image, layers.Dense(5)(x))

    compiled = lambda: {"optimizer": sgd(), "loss": keras.losses.CTC()}  # noqa: E731
    y = rng().integers(1, 5, (feed.rows, 3))
    return run(strategy, feed, build, compiled, pictures(feed.rows), y)


def capsules_of_norms(strategy, feed: Feed) -> Result:
    """`squash` and routing by agreement in a layer, margin loss as a function."""

    def squash(x):
        size = ops.sum(ops.square(x), axis=-1, keepdims=True)
        return size / (1 + size) * x / ops.sqrt(size + 1e-7)

    class Capsules(layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(
                shape=(3, shape[1], shape[2], 4), initializer="glorot_uniform"
            )

        def call(self, x):
            votes = ops.einsum("bip,cipq->bciq", x, self.kernel)
            logits = ops.zeros_like(votes[..., :1])
            for _ in range(2):
                out = squash(ops.sum(ops.softmax(logits, axis=1) * votes, axis=2, keepdims=True))
                logits += ops.sum(out * votes, axis=-1, keepdims=True)
            return ops.squeeze(out, 2)

    def build():
        image = keras.Input((8, 8, 1))
        x = layers.Reshape((-1, 4))(layers.Conv2D(4, 3, strides=3)(image))
        x = Capsules()(layers.Lambda(squash)(x))
        return keras.Model(image, layers.Lambda(lambda v: ops.sqrt(ops.sum(v**2, -1) + 1e-7))(x))

    def margin(y_true, y_pred):
        left = y_true * ops.square(ops.maximum(0.0, 0.9 - y_pred))
        return ops.sum(left + 0.5 * (1 - y_true) * ops.square(ops.maximum(0.0, y_pred - 0.1)), -1)

    y = keras.utils.to_categorical(classes(feed.rows), 3)
    return run(
        strategy, feed, build, lambda: {"optimizer": adam(), "loss": margin}, pictures(feed.rows), y
    )


def frozen_backbone(strategy, feed: Feed) -> Result:
    """Transfer: a frozen normalization that infers while its model trains, then a second `fit`."""

    def build():
        base = u_net_model("linear")
        base.trainable = False
        image = keras.Input((8, 8, 1))
        x = layers.GlobalAveragePooling2D()(base(image, training=False))
        return keras.Model(image, layers.Dense(3)(x))

    return run(
        strategy, feed, build, classifier_options(adam), pictures(feed.rows), classes(feed.rows)
    )


class CentralizedSGD(keras.optimizers.SGD):
    """An optimizer of the user's own, which changes gradients before they are applied."""

    def update_step(self, gradient, variable, learning_rate):
        if len(gradient.shape) > 1:
            gradient = gradient - ops.mean(
                gradient, axis=list(range(len(gradient.shape) - 1)), keepdims=True
            )
        super().update_step(gradient, variable, learning_rate)


def gradient_centralization(strategy, feed: Feed) -> Result:
    def build():
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(3, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )

    optimizer = lambda: CentralizedSGD(0.05, momentum=0.9)  # noqa: E731
    return run(
        strategy,
        feed,
        build,
        classifier_options(optimizer),
        pictures(feed.rows),
        classes(feed.rows),
    )


class Renormalization(layers.Layer):
    """A layer of the user's own with a state that follows the rows it sees, as a moving average.

    It asks no other rank: the state differs by rank until it is averaged, which is documented.
    """

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
        return x * self.scale


def counting_layer(strategy, feed: Feed) -> Result:
    def build():
        return keras.Sequential(
            [keras.Input((8, 8, 1)), layers.Flatten(), Renormalization(), layers.Dense(3)]
        )

    return run(strategy, feed, build, classifier_options(), pictures(feed.rows), classes(feed.rows))
