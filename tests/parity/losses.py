"""Losses: behind a softmax or sigmoid that saturates, smoothed, weighted, written by the user."""

from __future__ import annotations

import functools

import keras
import numpy as np
from keras import layers, ops

from tests.parity.feeding import Feed, Result, adam, rng, run, sgd

__all__ = [
    "cosine_and_kl",
    "focal_losses",
    "label_smoothing",
    "log_likelihood_of_a_mixture",
    "own_metric",
    "quantiles",
    "saturated_binary",
    "saturated_categorical",
    "saturated_in_a_list",
    "saturated_named_activation",
    "saturated_nested",
    "saturated_sigmoid_of_pixels",
    "saturated_sparse",
    "summed_loss_object",
    "unreduced_loss_object",
    "weighted_classes",
]


def large(rows: int):
    """Inputs so large that probabilities behind them are 0 and 1 in float32."""
    return rng().normal(0, 60, (rows, 5)).astype("float32")


def small(rows: int):
    return rng().normal(size=(rows, 5)).astype("float32")


def labels(rows: int, classes: int = 3):
    return np.random.default_rng(6).integers(0, classes, rows)


def network(units: int, activation: str | None = None, hidden: bool = False):
    def build():
        inner = [layers.Dense(6, activation="relu")] if hidden else []
        return keras.Sequential(
            [keras.Input((5,)), *inner, layers.Dense(units, activation=activation)]
        )

    return build


def compiled(loss, *, rate=1e-3, optimizer=None, metrics=("accuracy",), **options):
    return lambda: {
        "optimizer": optimizer() if optimizer is not None else keras.optimizers.SGD(rate),
        "loss": loss() if callable(loss) else loss,
        "metrics": list(metrics),
        **options,
    }


def saturated_sparse(strategy, feed: Feed) -> Result:
    return run(
        strategy,
        feed,
        network(3, "softmax"),
        compiled("sparse_categorical_crossentropy"),
        large(feed.rows),
        labels(feed.rows),
    )


def saturated_categorical(strategy, feed: Feed) -> Result:
    y = np.eye(3, dtype="float32")[labels(feed.rows)]
    return run(
        strategy,
        feed,
        network(3, "softmax"),
        compiled("categorical_crossentropy"),
        large(feed.rows),
        y,
    )


def saturated_binary(strategy, feed: Feed) -> Result:
    y = labels(feed.rows, 2)[:, None].astype("float32")
    return run(
        strategy, feed, network(1, "sigmoid"), compiled("binary_crossentropy"), large(feed.rows), y
    )


def saturated_sigmoid_of_pixels(strategy, feed: Feed) -> Result:
    """The last layer is an `Activation` behind a reshaped convolution."""

    def build():
        inputs = keras.Input((5,))
        x = layers.Conv1D(2, 3, padding="same")(layers.Reshape((5, 1))(inputs))
        return keras.Model(inputs, layers.Activation("sigmoid")(x))

    y = rng().integers(0, 2, (feed.rows, 5, 2)).astype("float32")
    return run(strategy, feed, build, compiled("binary_crossentropy"), large(feed.rows), y)


def saturated_named_activation(strategy, feed: Feed) -> Result:
    """`layers.Softmax` as a layer of its own, under a functional model."""

    def build():
        inputs = keras.Input((5,))
        return keras.Model(inputs, layers.Softmax()(layers.Dense(3)(inputs)))

    loss = keras.losses.SparseCategoricalCrossentropy
    return run(strategy, feed, build, compiled(loss), large(feed.rows), labels(feed.rows))


def saturated_nested(strategy, feed: Feed) -> Result:
    """The softmax stands in a model inside of a model."""

    def build():
        return keras.Sequential([keras.Input((5,)), network(4)(), network_of_four()])

    def network_of_four():
        return keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="softmax")])

    loss = "sparse_categorical_crossentropy"
    return run(
        strategy, feed, build, compiled(loss, rate=1e-4), large(feed.rows), labels(feed.rows)
    )


class TwoHeads(keras.Model):
    """A subclass that calls the activations itself."""

    def __init__(self):
        super().__init__()
        self.kind, self.flag = layers.Dense(3), layers.Dense(1)

    def call(self, x):
        return [ops.softmax(self.kind(x)), ops.sigmoid(self.flag(x))]


def saturated_in_a_list(strategy, feed: Feed) -> Result:
    y = (labels(feed.rows), labels(feed.rows, 2)[:, None].astype("float32"))
    losses = lambda: ["sparse_categorical_crossentropy", "binary_crossentropy"]  # noqa: E731
    return run(strategy, feed, TwoHeads, compiled(losses, metrics=()), large(feed.rows), y)


def label_smoothing(strategy, feed: Feed) -> Result:
    loss = functools.partial(keras.losses.CategoricalCrossentropy, label_smoothing=0.1)
    y = np.eye(3, dtype="float32")[labels(feed.rows)]
    return run(
        strategy,
        feed,
        network(3, "softmax", hidden=True),
        compiled(loss, optimizer=adam),
        small(feed.rows),
        y,
    )


def focal_losses(strategy, feed: Feed) -> Result:
    loss = functools.partial(keras.losses.CategoricalFocalCrossentropy, alpha=0.3, gamma=1.5)
    y = np.eye(3, dtype="float32")[labels(feed.rows)]
    return run(
        strategy,
        feed,
        network(3, "softmax", hidden=True),
        compiled(loss, optimizer=sgd),
        small(feed.rows),
        y,
    )


def cosine_and_kl(strategy, feed: Feed) -> Result:
    def build():
        inputs = keras.Input((5,))
        return keras.Model(
            inputs, {"cosine": layers.Dense(4)(inputs), "kl": layers.Dense(4, "softmax")(inputs)}
        )

    random = rng()
    y = {
        "cosine": random.normal(size=(feed.rows, 4)).astype("float32"),
        "kl": random.dirichlet(np.ones(4), feed.rows).astype("float32"),
    }
    losses = lambda: {"cosine": keras.losses.CosineSimilarity(), "kl": "kl_divergence"}  # noqa: E731
    return run(
        strategy, feed, build, compiled(losses, optimizer=sgd, metrics=()), small(feed.rows), y
    )


def quantiles(strategy, feed: Feed) -> Result:
    """A loss as a closure, of several outputs a row."""
    wanted = np.array([0.1, 0.5, 0.9], "float32")

    def pinball(y_true, y_pred):
        error = y_true - y_pred
        return ops.mean(ops.maximum(wanted * error, (wanted - 1) * error), axis=-1)

    y = rng().normal(size=(feed.rows, 1)).astype("float32")
    return run(
        strategy,
        feed,
        network(3, hidden=True),
        compiled(lambda: pinball, optimizer=adam, metrics=["mae"]),
        small(feed.rows),
        y,
    )


def log_likelihood_of_a_mixture(strategy, feed: Feed) -> Result:
    """A mixture density network: `logsumexp` of three Gaussians, a mean over the batch at the end."""

    def likelihood(y, found):
        weights, means, scales = ops.split(found, 3, axis=-1)
        scales = ops.softplus(scales) + 1e-2
        parts = ops.log_softmax(weights) - ops.log(scales) - 0.5 * ((y - means) / scales) ** 2
        return -ops.mean(ops.logsumexp(parts, axis=-1))

    y = rng().normal(size=(feed.rows, 1)).astype("float32")
    return run(
        strategy,
        feed,
        network(9, hidden=True),
        compiled(lambda: likelihood, optimizer=adam, metrics=()),
        small(feed.rows),
        y,
    )


class PowerLoss(keras.losses.Loss):
    """A loss object of the user's own."""

    def call(self, y_true, y_pred):
        return ops.mean(ops.abs(y_true - y_pred) ** 1.5, axis=-1)


def summed_loss_object(strategy, feed: Feed) -> Result:
    y = rng().normal(size=(feed.rows, 2)).astype("float32")
    loss = functools.partial(PowerLoss, reduction="sum")
    return run(
        strategy, feed, network(2, hidden=True), compiled(loss, metrics=()), small(feed.rows), y
    )


def unreduced_loss_object(strategy, feed: Feed) -> Result:
    y = rng().normal(size=(feed.rows, 2)).astype("float32")
    loss = functools.partial(PowerLoss, reduction=None)
    return run(
        strategy, feed, network(2, hidden=True), compiled(loss, metrics=()), small(feed.rows), y
    )


class BinaryTruePositives(keras.metrics.Metric):
    """The metric of the guide, and one with a state that is no count."""

    def __init__(self, **options):
        super().__init__(**options)
        self.true_positives = self.add_weight(shape=(3,), initializer="zeros", name="tp")

    def update_state(self, y_true, y_pred, sample_weight=None):
        right = ops.cast(
            ops.argmax(y_pred, -1) == ops.cast(ops.reshape(y_true, (-1,)), "int32"), "float32"
        )
        if sample_weight is not None:
            right *= ops.cast(sample_weight, "float32")
        classes = ops.one_hot(ops.reshape(ops.cast(y_true, "int32"), (-1,)), 3)
        self.true_positives.assign_add(ops.sum(classes * right[:, None], axis=0))

    def result(self):
        return ops.sum(self.true_positives * ops.arange(1.0, 4.0))


def own_metric(strategy, feed: Feed) -> Result:
    loss = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)
    metrics = lambda: [BinaryTruePositives(name="own"), "sparse_top_k_categorical_accuracy"]  # noqa: E731
    options = lambda: compiled(loss, optimizer=sgd, metrics=metrics())()  # noqa: E731
    return run(
        strategy, feed, network(3, hidden=True), options, small(feed.rows), labels(feed.rows)
    )


def weighted_classes(strategy, feed: Feed) -> Result:
    """`class_weight` with a softmax output and labels as one-hot rows."""
    y = np.eye(3, dtype="float32")[labels(feed.rows)]
    return run(
        strategy,
        feed,
        network(3, "softmax", hidden=True),
        compiled("categorical_crossentropy", optimizer=sgd),
        small(feed.rows),
        y,
        class_weight={0: 0.5, 1: 2.0, 2: 1.0},
    )
