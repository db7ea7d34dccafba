"""A gradient stage of one's own: int8 gradients with error feedback."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.conftest import on_ranks
from tfdist.collectives import all_gather
from tfdist.extend import GradientStage, Position


class Int8(GradientStage):
    """Sends each gradient as int8; what rounding takes away is added to the next one."""

    position = Position.REDUCE

    def __init__(self):
        self._residuals = {}

    def check(self, *, mesh, zero_stage, optimizer):
        """Local optimizers send no gradients."""
        if mesh.shape["tensor"] > 1:
            raise ValueError(f"Int8 requires tensor=1. Received: {mesh!r}.")

    def claims(self, item):
        """Dense gradients."""
        return not isinstance(item.gradient, (tf.IndexedSlices, type(None)))

    def __call__(self, items, context):
        """The means, or sums, of what the ranks sent."""
        return [self._reduced(number, item) for number, item in enumerate(items)]

    def _reduced(self, number, item):
        residual = self._residual(item.variable)
        wanted = item.gradient + residual
        scale = tf.maximum(tf.reduce_max(tf.abs(wanted)), 1e-30) / 127.0
        levels = tf.cast(tf.round(wanted / scale), tf.int8)
        residual.assign(wanted - tf.cast(levels, tf.float32) * scale)
        rows = all_gather(levels[None], item.group, name=f"int8/{number}")
        scales = all_gather(scale[None], item.group, name=f"int8/{number}/scale")
        sent = tf.cast(rows, tf.float32) * tf.reshape(scales, [-1] + [1] * wanted.shape.rank)
        reduce = tf.reduce_mean if item.reduction == "mean" else tf.reduce_sum
        return reduce(sent, axis=0)

    def _residual(self, variable):
        if id(variable) not in self._residuals:
            with tf.init_scope():
                self._residuals[id(variable)] = tf.Variable(
                    tf.zeros(variable.shape), trainable=False
                )
        return self._residuals[id(variable)]


STEPS, ROWS, RATE = 6, 8, 0.1


def data():
    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS * ROWS, 3)).astype("float32")
    return x, (x @ np.array([[1.0], [-2.0], [0.5]], "float32")).astype("float32")


def trained(stages, accumulate=None, **options):
    strategy = tfdist.testing.strategy(tfdist.Mesh(), gradient_stages=stages, **options)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        optimizer = keras.optimizers.SGD(RATE, gradient_accumulation_steps=accumulate)
        model.compile(optimizer, "mse")
    x, y = data()
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    return model.get_weights()[0]


def by_hand():
    """Two ranks with half of each batch, in NumPy."""
    x, y = data()
    w = np.zeros((3, 1), "float32")
    residuals = [np.zeros_like(w), np.zeros_like(w)]
    for step in range(STEPS):
        sent = []
        for rank in range(2):
            begin = step * ROWS + rank * ROWS // 2
            rows, labels = x[begin : begin + ROWS // 2], y[begin : begin + ROWS // 2]
            gradient = 2 * rows.T @ (rows @ w - labels) / len(rows)
            wanted = gradient + residuals[rank]
            scale = np.abs(wanted).max() / 127
            sent.append(np.round(wanted / scale) * scale)
            residuals[rank] = wanted - sent[-1]
        w = w - RATE * (sent[0] + sent[1]) / 2
    return w


def with_int8():
    return trained([Int8()])


@on_ranks(("horovod", 2))
def test_it_trains_by_what_was_sent(pool):
    expected = by_hand()
    for weights in pool.run(with_int8, timeout=120):
        np.testing.assert_allclose(weights, expected, rtol=1e-5)


class Doubled(GradientStage):
    """Doubles the gradient of an update."""

    position = Position.UPDATE

    def __call__(self, items, context):
        return [2.0 * item.gradient for item in items]


class Halved(Doubled):
    """Halves each rank's gradient."""

    position = Position.LOCAL

    def __call__(self, items, context):
        return [0.5 * item.gradient for item in items]


def twice_and_plain(accumulate, zero_stage):
    plain = trained([], accumulate, zero_stage=zero_stage)
    both = trained([Doubled(), Halved()], accumulate, zero_stage=zero_stage)
    return plain, both, trained([Halved()], accumulate, zero_stage=zero_stage)


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(("accumulate", "zero_stage"), [(None, 0), (2, 1), (2, 2)])
def test_stages_of_two_places_undo_each_other(pool, accumulate, zero_stage):
    for plain, both, halved in pool.run(twice_and_plain, accumulate, zero_stage, timeout=200):
        np.testing.assert_allclose(both, plain, rtol=1e-5)
        assert np.abs(halved - plain).max() > 0.05


def refusals():
    found = []
    for options in ({"zero_stage": 3}, {}):
        with pytest.raises((ValueError, TypeError)) as caught:
            trained([Int8() if options else "int8"], **options)
        found.append(str(caught.value))
    return found


@on_ranks(("horovod", 2))
def test_what_cannot_be_used_is_refused(pool):
    for zero, kind in pool.run(refusals, timeout=100):
        assert "zero_stage=2" in zero and "Int8" in zero
        assert "gradient_stages" in kind and "'int8'" in kind
