"""Python generators, which go on where they were last drawn from, whoever drew."""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest

from tests.conftest import on_ranks
from tests.strategies import programs
from tests.strategies.programs import scope, start

ROWS = 5


def batch(number: int):
    random = np.random.default_rng(number)
    return random.normal(size=(ROWS, 4)).astype("float32"), random.integers(0, 3, ROWS)


def endless(drawn: list, first: int = 0):
    number = first
    while True:
        drawn.append(number)
        yield batch(number)
        number += 1


class Pause(keras.callbacks.Callback):
    """Time for a prefetch to draw ahead, more of it on one rank than on another."""

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.2 * (1 + getattr(self.model.distribute_strategy, "is_chief", False)))


def compiled():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
    return model


def drawn_and_trained(strategy):
    start()
    drawn: list = []
    validated: list = []
    data, pause = endless(drawn), [Pause()]
    with scope(strategy):
        model = compiled()
    model.fit(data, steps_per_epoch=3, epochs=2, verbose=0, callbacks=pause)
    losses = model.fit(
        data,
        steps_per_epoch=3,
        epochs=3,
        verbose=0,
        callbacks=pause,
        validation_data=endless(validated, 100),
        validation_steps=3,
    ).history["val_loss"]
    for _ in range(2):
        losses.append(model.evaluate(data, steps=3, verbose=0))
    return drawn, validated, losses, model.get_weights()


def of_arrays(strategy):
    """The same batches, one by one."""
    start()
    with scope(strategy):
        model = compiled()
    losses = []

    def mean_loss(numbers):
        losses.append(np.mean([model.evaluate(*batch(n), verbose=0) for n in numbers]))

    for number in range(6):
        model.train_on_batch(*batch(number))
    for epoch in range(3):
        for number in range(6 + 3 * epoch, 9 + 3 * epoch):
            model.train_on_batch(*batch(number))
        # Keras keeps the two batches that it looks at first, and begins with them each time.
        mean_loss([100, 101, 102 + epoch])
    mean_loss([15, 16, 17])
    mean_loss([18, 19, 20])
    return losses, model.get_weights()


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 3))
def test_all_ranks_draw_the_same_batches_of_a_generator(pool, one_process):
    losses, weights = one_process.run(programs.in_one_process, of_arrays)[0]
    for drawn, validated, found, found_weights in pool.run(programs.on_rank, drawn_and_trained):
        assert drawn == list(range(21))
        assert validated == [100, 101, 102, 103, 104]
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for own, reference in zip(found_weights, weights, strict=True):
            np.testing.assert_allclose(own, reference, rtol=1e-5, atol=1e-6)
