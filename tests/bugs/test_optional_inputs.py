"""Optional inputs that are None go through `fit`, `evaluate`, `predict` and their kin.

The story: `model.fit({"a": x, "b": None}, y)` ended in `'NoneType' object is not subscriptable`.
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

ROWS, BATCH = 9, 4


class Add(keras.layers.Layer):
    def call(self, a, b=None):
        return b if a is None else a if b is None else a + b

    def compute_output_shape(self, a_shape, b_shape=None):
        return a_shape or b_shape


def train(strategy, *, first: bool, listed: bool, as_data_set: bool):
    start()
    x = np.random.default_rng(0).normal(size=(ROWS, 2)).astype("float32")
    y = x.sum(-1, keepdims=True)

    def inputs(x):
        pair = (None, x) if first else (x, None)
        return pair if listed else dict(zip("ab", pair, strict=True))

    with scope(strategy):
        a, b = (keras.Input((2,), name=name, optional=True) for name in "ab")
        outputs = keras.layers.Dense(1)(Add()(a, b))
        model = keras.Model([a, b] if listed else {"a": a, "b": b}, outputs)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    data = (list(inputs(x)) if listed else inputs(x), y)
    some = {"batch_size": BATCH, "verbose": 0}
    if as_data_set:
        whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        data, some = (whole.map(lambda x, y: (inputs(x), y)),), {"verbose": 0}
    history = model.fit(
        *data, shuffle=False, epochs=2, validation_data=data[0] if as_data_set else data, **some
    )
    evaluated = model.evaluate(*data, **some)
    predicted = model.predict(data[0], **some)
    batch = (list(inputs(x)) if listed else inputs(x), y)
    single = model.test_on_batch(*batch), model.train_on_batch(*batch)
    # Rows that divide are split.
    even = (list(inputs(x[:6])) if listed else inputs(x[:6]), y[:6])
    single += model.test_on_batch(*even), model.train_on_batch(*even)
    of_batch = model.predict_on_batch(batch[0])
    return outcome(
        model,
        history.history,
        evaluated=evaluated,
        predicted=predicted,
        single=single,
        of_batch=of_batch,
    )


QUICK = [(False, False, False), (True, True, True)]
CASES = [(first, listed, data) for first in (0, 1) for listed in (0, 1) for data in (0, 1)]


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize(("first", "listed", "as_data_set"), slow_but(QUICK, CASES))
def test_as_one_process(pool, one_process, first, listed, as_data_set):
    program = functools.partial(train, first=first, listed=listed, as_data_set=as_data_set)
    check(pool, one_process, program)
