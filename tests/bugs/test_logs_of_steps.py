"""What a custom step returns is logged as one process logs it.

The story: `{**super().train_step(data), "lr": self.optimizer.learning_rate}` raised an AttributeError,
for it is a variable of Keras' and no tensor. A vector, as a mean over the rows for each class, was the
rank's own: other numbers on each rank.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.bugs.comparing import check, outcome
from tests.conftest import on_ranks, slow_but
from tests.strategies.programs import scope, start

ROWS, BATCH = 9, 4  # The last batch has one row: a rank has none.


class Logs(keras.Sequential):
    def train_step(self, batch):
        logs = super().train_step(batch)
        outputs = self(batch[0])
        mean = tf.reduce_mean(outputs)
        return {
            **logs,
            "rate": self.optimizer.learning_rate,
            "steps": self.optimizer.iterations,
            # Plain Keras logs no variable of TensorFlow's from an eager step.
            "plain": 3 if tf.executing_eagerly() else self.count,
            "kernel": self.layers[0].kernel,
            "mean": tf.reduce_mean(outputs, 0),
            "matrix": {"inner": tf.reduce_mean(outputs[:, :, None] * outputs[:, None], 0)},
            "exact": tf.cast(mean, tf.float64),
            "python": float(mean) if tf.executing_eagerly() else 0.5,
            "number": 7,
            "flag": tf.constant(True),
        }


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        flat = tf.nest.flatten(logs)
        self.batches.append([np.asarray(value, "float64").tolist() for value in flat])


def train(strategy, **compiled):
    start()
    chance = np.random.default_rng(0)
    x = chance.normal(size=(ROWS, 3)).astype("float32")
    with scope(strategy):
        model = Logs([keras.Input((3,)), keras.layers.Dense(2)])
        model.count = tf.Variable(3, trainable=False)
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        model.compile(keras.optimizers.SGD(rate), "mse", **compiled)
    seen = Seen()
    model.fit(x, x[:, :2], batch_size=BATCH, shuffle=False, callbacks=[seen], verbose=0)
    flat = {f"{i}/{j}": v for i, b in enumerate(seen.batches) for j, v in enumerate(b)}
    return outcome(model, seen=flat)


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("zero_stage", slow_but([0], [0, 3]))
@pytest.mark.parametrize("eager", slow_but([False], [False, True]))
def test_as_one_process(pool, one_process, zero_stage, eager):
    program = functools.partial(train, run_eagerly=eager)
    check(pool, one_process, program, zero_stage=zero_stage)


class OfRows(keras.Sequential):
    def train_step(self, batch):
        return {**super().train_step(batch), "each": self(batch[0])[:, 0]}


def of_rows(strategy):
    start()
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    with scope(strategy):
        model = OfRows([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    seen = Seen()
    model.fit(x, x[:, :2], batch_size=BATCH, shuffle=False, callbacks=[seen], verbose=0)
    return outcome(model, seen={f"{i}": np.hstack(b) for i, b in enumerate(seen.batches)})


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_a_number_for_each_row_is_joined(pool, one_process):
    check(pool, one_process, of_rows)
