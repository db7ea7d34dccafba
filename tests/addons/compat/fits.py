"""Fits of a model whose numbers are worked out by hand."""

from __future__ import annotations

import types

import keras
import numpy as np
import tensorflow as tf

__all__ = [
    "FourReplicas",
    "Rates",
    "averaging_callback",
    "fit",
    "fit_on_four",
    "one_weight_model",
    "weight_of",
]


class FourReplicas(tf.distribute.OneDeviceStrategy):
    """One device that says it is four: Keras then divides the loss by four."""

    num_replicas_in_sync = 4


class Rates(keras.callbacks.Callback):
    """Writes down the rate that each step ran with."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.learning_rate))


def one_weight_model(optimizer, **compile_arguments):
    """One weight, from 0, whose gradient is 1 for a batch of ones."""
    model = keras.Sequential(
        [keras.Input([1]), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
    )
    model.compile(
        optimizer,
        loss=lambda y_true, y_pred: keras.ops.mean(y_pred, axis=-1),
        **compile_arguments,
    )
    return model


def weight_of(model):
    return float(model.get_weights()[0][0, 0])


def fit(model, callbacks, steps=3, **arguments):
    """Trains for `steps` steps an epoch; returns the rate of each step, and the history."""
    rates = Rates()
    history = model.fit(
        np.ones([steps, 1]),
        np.zeros([steps, 1]),
        batch_size=1,
        verbose=0,
        callbacks=[*callbacks, rates],
        **arguments,
    )
    return rates.seen, history.history


def fit_on_four(callback, **arguments):
    with FourReplicas("/CPU:0").scope():
        model = one_weight_model(keras.optimizers.SGD(0.4))
    return model, *fit(model, [callback], **arguments)


def averaging_callback(engine):
    """A `MetricAverageCallback` of a model that two ranks train, by an engine."""
    from tfdist.addons.compat.horovod import MetricAverageCallback

    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model._distribute_strategy = types.SimpleNamespace(engine=engine, num_replicas_in_sync=2)
    callback = MetricAverageCallback()
    callback.set_model(model)
    return callback
