"""What `compile` offers: optimizers, losses, weights of samples, metrics; each as a function of a strategy."""

from __future__ import annotations

import functools

import keras
import numpy as np
import tensorflow as tf

from tests.strategies import programs
from tests.strategies.programs import BATCH, UNEVEN_ROWS, finish, images, mlp, scope, start

__all__ = [
    "class_weights",
    "clip_by_global_norm",
    "clip_by_norm",
    "clip_by_value",
    "clip_sparse_gradients",
    "compiled",
    "fit_images",
    "frozen_layers",
    "gradient_accumulation",
    "loss_of_each_sample",
    "loss_over_sum_of_weights",
    "loss_summed_over_batch",
    "masks",
    "metrics_of_many_states",
    "moving_average_of_weights",
    "regularizers",
    "sample_weights",
]


def fit_images(strategy, model_of, compile_of, *, data=None, epochs=2, evaluate=None, **fit):
    """Compiles and trains on the uneven images; `data` turns arrays into what `fit` is given."""
    start()
    x, y = images(UNEVEN_ROWS)
    with scope(strategy):
        model = model_of()
        model.compile(**compile_of())
    given = {"x": x, "y": y, "batch_size": BATCH} if data is None else {"x": data(x, y)}
    history = model.fit(**given, epochs=epochs, verbose=0, **fit)
    return finish(model, history, x, y, **(evaluate or {}))


def compiled(optimizer=None, loss=None, **options):
    return {
        "optimizer": optimizer or programs.optimizer("sgd"),
        "loss": loss or programs.cross_entropy(),
        **options,
    }


def clip_by_norm(strategy):
    optimizer = lambda: programs.optimizer("sgd", clipnorm=0.05)  # noqa: E731
    return fit_images(strategy, mlp, lambda: compiled(optimizer()))


def clip_by_global_norm(strategy):
    return fit_images(
        strategy, mlp, lambda: compiled(programs.optimizer("sgd", global_clipnorm=0.1))
    )


def clip_by_value(strategy):
    return fit_images(strategy, mlp, lambda: compiled(programs.optimizer("sgd", clipvalue=0.01)))


def gradient_accumulation(strategy):
    options = {"gradient_accumulation_steps": 2, "global_clipnorm": 0.5}
    return fit_images(strategy, mlp, lambda: compiled(programs.optimizer("sgd", **options)))


def moving_average_of_weights(strategy):
    options = {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 3}
    return fit_images(
        strategy, mlp, lambda: compiled(programs.optimizer("sgd", weight_decay=0.05, **options))
    )


def regularizers(strategy):
    def model():
        return keras.Sequential(
            [
                keras.layers.Input((8, 8, 1)),
                keras.layers.Flatten(),
                keras.layers.Dense(
                    8,
                    "tanh",
                    kernel_regularizer="l2",
                    activity_regularizer=keras.regularizers.L2(0.1),
                ),
                keras.layers.Dense(4),
            ]
        )

    return fit_images(strategy, model, compiled)


def sample_weights(strategy):
    weights = np.random.default_rng(3).uniform(0, 2, UNEVEN_ROWS).astype("float32")
    return fit_images(
        strategy,
        mlp,
        lambda: compiled(weighted_metrics=["accuracy"], metrics=["accuracy"]),
        sample_weight=weights,
        evaluate={"sample_weight": weights},
    )


def loss_over_sum_of_weights(strategy):
    weights = np.random.default_rng(3).uniform(0, 2, UNEVEN_ROWS).astype("float32")
    loss = functools.partial(programs.cross_entropy, reduction="mean_with_sample_weight")
    return fit_images(strategy, mlp, lambda: compiled(loss=loss()), sample_weight=weights)


def loss_summed_over_batch(strategy):
    optimizer = lambda: keras.optimizers.SGD(0.002, momentum=0.9)  # noqa: E731
    return fit_images(
        strategy, mlp, lambda: compiled(optimizer(), programs.cross_entropy(reduction="sum"))
    )


def loss_of_each_sample(strategy):
    # Also an optimizer that was made outside of the scope.
    rate = keras.optimizers.SGD(0.002, momentum=0.9)
    loss = programs.cross_entropy(reduction=None)
    return fit_images(strategy, mlp, lambda: compiled(rate, loss))


def class_weights(strategy):
    return fit_images(strategy, mlp, compiled, class_weight={0: 1.0, 1: 3.0, 2: 0.5, 3: 1.0})


def masks(strategy):
    """Sequences of different lengths: a mean over the entries that are not padding."""
    return fit_sequences(strategy)


def clip_sparse_gradients(strategy):
    """Keras takes the norm of an embedding's gradient over its rows, an id that comes twice twice."""
    return fit_sequences(strategy, global_clipnorm=0.05)


def fit_sequences(strategy, **options):
    start()
    random = np.random.default_rng(0)
    tokens = random.integers(1, 9, (UNEVEN_ROWS, 7))
    tokens[np.arange(7) >= random.integers(1, 8, UNEVEN_ROWS)[:, None]] = 0
    targets = random.integers(0, 5, (UNEVEN_ROWS, 7))
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.layers.Embedding(9, 6, mask_zero=True),
                keras.layers.LSTM(5, return_sequences=True),
                keras.layers.Dense(5),
            ]
        )
        model.compile(**compiled(programs.optimizer("sgd", **options), metrics=["accuracy"]))
    history = model.fit(tokens, targets, batch_size=BATCH, epochs=2, verbose=0)
    return finish(model, history, tokens, targets)


def metrics_of_many_states(strategy):
    def binary(x, y):
        return tf.data.Dataset.from_tensor_slices((x, (y > 1).astype("float32"))).batch(BATCH)

    def model():
        return keras.Sequential(
            [
                keras.layers.Input((8, 8, 1)),
                keras.layers.Flatten(),
                keras.layers.Dense(1, "sigmoid"),
            ]
        )

    metrics = ["AUC", "Precision", "Recall", "TruePositives", "binary_accuracy"]
    result = fit_images(
        strategy,
        model,
        lambda: {
            "optimizer": programs.optimizer("sgd"),
            "loss": "binary_crossentropy",
            "metrics": metrics,
        },
        data=binary,
        evaluate={},
    )
    return result


def frozen_layers(strategy):
    def model():
        model = mlp()
        model.layers[1].trainable = False
        return model

    return fit_images(strategy, model, compiled)
