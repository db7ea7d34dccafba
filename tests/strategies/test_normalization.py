"""Synchronized BatchNormalization: the statistics of the whole batch, whatever its mean."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.strategies import programs
from tests.strategies.programs import scope, start


def train(strategy, rows: int, mean: float, channels: int):
    start()
    chance = np.random.default_rng(0)
    x = (mean + chance.normal(size=(rows, 4, channels))).astype("float32")
    y = chance.normal(size=(rows, 4, 1)).astype("float32")
    is_synchronized = strategy is not None
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input((4, channels)),
                keras.layers.BatchNormalization(synchronized=is_synchronized, name="first"),
                keras.layers.Dense(6, activation="relu"),
                keras.layers.BatchNormalization(synchronized=is_synchronized, name="second"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    # The last batch leaves ranks without rows.
    history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0).history
    return history["loss"], model.get_weights()


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("mean", slow_but([1000.0], [0.0, 1000.0]))
def test_a_large_mean_leaves_the_deviation(pool, one_process, mean):
    program = functools.partial(train, rows=9, mean=mean, channels=3)
    losses, weights = one_process.run(programs.in_one_process, program)[0]
    # The rounding of the data itself counts a thousand times as much at a mean of 1000.
    tolerance = 1e-5 if mean == 0.0 else 1e-3
    for found, found_weights in pool.run(programs.on_rank, program):
        np.testing.assert_allclose(found, losses, rtol=tolerance)
        for own, reference in zip(found_weights, weights, strict=True):
            np.testing.assert_allclose(own, reference, rtol=tolerance, atol=tolerance)
