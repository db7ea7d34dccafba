"""Losses and metric functions that are one number of a batch.

The story: `keras.losses.Dice`, `Tversky` and `Circle` take a quotient over the rows, or compare them; a
rank computed them of its own rows, and weights were up to 4% off, without a word.
"""

from __future__ import annotations

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.bugs.comparing import check, on_mesh, outcome
from tests.conftest import on_ranks, slow_but
from tests.strategies.programs import scope, start
from tfdist import Mesh

ROWS, BATCH = 25, 8  # The last batch has one row.


def data():
    chance = np.random.default_rng(6)
    x = chance.normal(size=(ROWS, 5)).astype("float32")
    return x, (x[:, :4] > 0.3).astype("float32"), chance.uniform(0.5, 2.0, ROWS).astype("float32")


def coefficient(y_true, y_pred):
    """What people write: one number of all rows."""
    y_true = tf.cast(y_true, y_pred.dtype)
    both = tf.reduce_sum(y_true * y_pred)
    return (2.0 * both + 1.0) / (tf.reduce_sum(y_true) + tf.reduce_sum(y_pred) + 1.0)


def own_dice(y_true, y_pred):
    return 1.0 - coefficient(y_true, y_pred)


def own_mean(y_true, y_pred):
    return tf.reduce_mean(tf.square(tf.cast(y_true, y_pred.dtype) - y_pred))


class OwnLoss(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return own_dice(y_true, y_pred)


def dense():
    return [keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(4, "sigmoid")]


def unit():
    return [keras.Input((5,)), keras.layers.Dense(4), keras.layers.UnitNormalization()]


LOSSES = {
    "Dice": keras.losses.Dice,
    "Dice of rows": lambda: keras.losses.Dice(axis=1),
    "Dice of columns": lambda: keras.losses.Dice(axis=0),
    "dice": lambda: "dice",
    "Dice summed": lambda: keras.losses.Dice(reduction="sum"),
    "Tversky": lambda: keras.losses.Tversky(alpha=0.3, beta=0.7),
    "tversky": lambda: keras.losses.tversky,
    "own": lambda: tfdist.layers.over_batch(own_dice),
    "own class": lambda: tfdist.layers.over_batch(OwnLoss()),
    "mean": lambda: tfdist.layers.mean_of_rows(own_mean),
}


def train(strategy, loss: str, *, weighted: bool = False, **compiled):
    start()
    x, y, weights = data()
    with scope(strategy):
        model = keras.Sequential(dense())
        of = tfdist.layers.over_batch(coefficient)
        model.compile(
            keras.optimizers.SGD(0.2), LOSSES[loss](), metrics=[of, keras.losses.dice], **compiled
        )
    history = model.fit(
        x,
        y,
        sample_weight=weights if weighted else None,
        batch_size=BATCH,
        epochs=2,
        shuffle=False,
        verbose=0,
    ).history
    evaluation = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    return outcome(model, history, evaluation=evaluation)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("horovod", 3)])
@pytest.mark.parametrize("loss", slow_but(["Dice", "own"], LOSSES))
def test_as_one_process(pool, one_process, loss):
    check(pool, one_process, functools.partial(train, loss=loss))


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("loss", ["Dice", "Tversky", "own", "Dice of rows"])
def test_with_weights_of_rows(pool, one_process, loss, zero_stage):
    program = functools.partial(train, loss=loss, weighted=True)
    check(pool, one_process, program, zero_stage=zero_stage)


def train_circle(strategy, weighted: bool = False):
    start()
    x, _, weights = data()
    labels = np.random.default_rng(1).integers(0, 3, ROWS)
    with scope(strategy):
        model = keras.Sequential(unit())
        model.compile(keras.optimizers.SGD(0.01), keras.losses.Circle(gamma=8.0))
    history = model.fit(
        x,
        labels,
        sample_weight=weights if weighted else None,
        batch_size=12,
        epochs=2,
        shuffle=False,
        verbose=0,
    ).history
    return outcome(model, history)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("horovod", 3)])
@pytest.mark.parametrize("weighted", slow_but([False], [False, True]))
def test_circle(pool, one_process, weighted):
    check(pool, one_process, functools.partial(train_circle, weighted=weighted), tolerance=5e-5)


class Heard(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def warnings_of(strategy):
    """The lines about functions that nobody has declared."""
    start()
    heard = Heard()
    logging.getLogger("tfdist").addHandler(heard)
    x, y, _ = data()

    def gathers(y_true, y_pred):
        return own_dice(strategy.gather(y_true, axis=0), strategy.gather(y_pred, axis=0))

    try:
        for loss in (own_dice, own_dice, gathers, "mse", keras.losses.Dice(), LOSSES["own"]()):
            with scope(strategy):
                model = keras.Sequential(dense())
                model.compile("sgd", loss, metrics=[own_mean])
            model.fit(x, y, batch_size=BATCH, verbose=0)
    finally:
        logging.getLogger("tfdist").removeHandler(heard)
    return [line for line in heard.lines if "over_batch" in line]


@on_ranks(("horovod", 2))
def test_an_undeclared_function_is_asked_about_once(pool):
    chief, other = pool.run(on_mesh, warnings_of, Mesh(), {}, timeout=120)
    assert len(chief) == 2
    assert any("own_dice" in line for line in chief) and any("own_mean" in line for line in chief)
    assert other == []


def in_a_pipeline(strategy):
    x, y, _ = data()
    with scope(strategy):
        model = tfdist.pipeline.PipelineModel(keras.Sequential(dense()), num_microbatches=2)
        model.compile("sgd", keras.losses.Dice())
    model.fit(x[:16], y[:16], batch_size=8, verbose=0)


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_micro_batches_are_refused(pool):
    with pytest.raises(ValueError, match="num_microbatches=1"):
        pool.run(on_mesh, in_a_pipeline, Mesh(pipeline=2), {}, timeout=60)


def test_what_is_no_function_is_refused():
    for declare in (tfdist.layers.over_batch, tfdist.layers.mean_of_rows):
        with pytest.raises(TypeError, match=r"keras\.losses\.Loss"):
            declare(keras.metrics.Mean())
    with pytest.raises(ValueError, match="aggregation"):
        tfdist.layers.set_aggregation(keras.Variable(0.0), "median")
