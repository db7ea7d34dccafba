"""What was made inside of a scope, and what outside.

The story: a model that was built outside and compiled inside ended in `Need to be inside "with
strategy.scope()"`, where the user was. `parallelize` of a `Sequential` raised an AttributeError.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.bugs.comparing import check, on_mesh, outcome
from tests.conftest import on_ranks
from tests.strategies.programs import scope, start
from tfdist import Mesh


def rows():
    x = np.random.default_rng(0).normal(size=(6, 4)).astype("float32")
    return x, x[:, :1]


def network():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def mixed(strategy):
    """What is said, by what was made where."""
    start()
    x, y = rows()
    outside = network()
    with strategy.scope():
        inside = network()
        outside.compile("adam", "mse")
        optimizer = keras.optimizers.Adam()
    said = {}
    for name in ("fit", "train_on_batch"):
        with pytest.raises(RuntimeError) as error:
            getattr(outside, name)(x, y)
        said[name] = str(error.value)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(inside(x) - y))
    gradients = tape.gradient(loss, inside.trainable_variables)
    with pytest.raises(RuntimeError) as error:
        optimizer.apply(gradients, inside.trainable_variables)
    said["apply"] = str(error.value)
    with strategy.scope():
        optimizer.build(inside.trainable_variables)
    optimizer.apply(gradients, inside.trainable_variables)
    return said


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
def test_a_line_names_the_cause(pool):
    for said in pool.run(on_mesh, mixed, Mesh(), {}):
        for name in ("fit", "train_on_batch"):
            assert "the model was built outside" in said[name] and "kernel" in said[name]
        assert "optimizer.build(" in said["apply"]


def optimizer_outside(strategy):
    """An optimizer that was made outside works in `strategy.run`, as in `fit`."""
    start()
    x, y = rows()
    with scope(strategy):
        model = network()
    optimizer = keras.optimizers.Adam(0.1)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x) - y)) / 6
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
    if strategy is None:
        for batch in data:
            step(*batch)
    else:
        for batch in strategy.experimental_distribute_dataset(data):
            strategy.run(step, args=batch)
    return outcome(model)


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
def test_an_optimizer_of_outside(pool, one_process):
    check(pool, one_process, optimizer_outside)


def split(strategy):
    start()
    x, _ = rows()
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, "tanh", name="d0"),
                keras.layers.Dense(3, name="d1"),
            ]
        )
        if strategy is not None:
            model = tfdist.parallelize(model, {".*d0/kernel": "column", ".*d1/kernel": "row"})
        model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(x, x[:, :3], batch_size=4, verbose=0, shuffle=False).history
    return outcome(model, history, predicted=model.predict(x, verbose=0))


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
def test_a_sequential_is_split(pool, one_process):
    check(pool, one_process, split, Mesh(tensor=2))
