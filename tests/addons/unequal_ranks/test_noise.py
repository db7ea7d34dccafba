"""The noise of gradients, beside the exact value; batches that grow with it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.addons.unequal_ranks.test_batch_shares import with_shares
from tests.conftest import on_ranks
from tests.strategies import programs
from tfdist.addons.unequal_ranks import AdaptiveBatch, GradientNoise
from tfdist.addons.unequal_ranks.adaptive_batch import adascale_gain
from tfdist.addons.unequal_ranks.noise import Noise
from tfdist.step.hooks import active_hooks

WIDTH, DEVIATION, DISTANCE = 64, 3.0, 2.0


class Quadratic(keras.layers.Layer):
    """|w - x|^2 / 2: a sample's gradient is w - x."""

    def build(self, shape):
        self.w = self.add_weight(shape=(WIDTH,), initializer="zeros", name="w")

    def call(self, x):
        return tf.reduce_sum(tf.square(self.w - x), axis=-1, keepdims=True) / 2


def quadratic(strategy, optimizer, shares=None):
    shared = strategy if shares is None else with_shares(strategy, shares)
    programs.start()
    with shared.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), Quadratic()])
        model.compile(optimizer, loss=lambda y, found: tf.reduce_mean(found))
    return model


def samples(rows, seed=0):
    random = np.random.default_rng(seed)
    # The j-th coordinate deviates by DEVIATION times sqrt(2 j / WIDTH); the mean is DISTANCE away.
    deviations = DEVIATION * np.sqrt(2 * np.arange(WIDTH) / (WIDTH - 1))
    x = DISTANCE / np.sqrt(WIDTH) + random.normal(size=(rows, WIDTH)) * deviations
    return x.astype("float32"), np.zeros([rows, 1], "float32")


VARIANCE = DEVIATION**2 * WIDTH  # The deviations' squares are DEVIATION^2 on average.
SCALE = VARIANCE / DISTANCE**2


def measure(strategy, accumulation, shares):
    """At rest, so that the exact value stays."""
    optimizer = keras.optimizers.SGD(0.0, gradient_accumulation_steps=accumulation)
    model = quadratic(strategy, optimizer, shares)
    noise = GradientNoise(decay=0.998)
    x, y = samples(300 * 128)
    history = model.fit(x, y, batch_size=128, verbose=0, callbacks=[noise], shuffle=False)
    return noise.noise, history.history


@on_ranks(("tensorflow", 2), slow=[("horovod", 3)])
@pytest.mark.parametrize(
    ("accumulation", "shares"),
    [(None, None), pytest.param(3, [3, 1], marks=pytest.mark.slow)],
    ids=["equal", "accumulated, unequal"],
)
def test_the_noise_scale_is_that_of_the_covariance(pool, accumulation, shares):
    shares = None if shares is None else (*shares, 2)[: pool.num_ranks]
    for noise, history in pool.run(programs.on_rank, measure, accumulation, shares):
        assert noise.updates == 300 // (accumulation or 1)
        assert noise.rows == pytest.approx(128)
        assert noise.variance == pytest.approx(VARIANCE, rel=0.05)
        assert noise.scale == pytest.approx(SCALE, rel=0.1)
        assert history["noise_scale"] == [noise.scale]


def test_one_process_measures_micro_steps(one_process):
    noise, _ = one_process.run(programs.on_rank, measure, 4, None)[0]
    assert noise.scale == pytest.approx(SCALE, rel=0.1)


def grow(strategy, rate):
    optimizer = keras.optimizers.SGD(1e-3, gradient_accumulation_steps=8)
    model = quadratic(strategy, optimizer)
    adaptive = AdaptiveBatch(every=4, rate=rate)
    x, y = samples(96 * 8)
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[adaptive])
    return {
        "accumulation": adaptive.accumulation,
        "rate": float(model.optimizer.learning_rate),
        "logs": history.history,
        "w": model.get_weights()[0],
        "updates": adaptive.noise.updates,
    }


@on_ranks(("tensorflow", 2))
def test_batches_grow_with_the_noise(pool):
    results = pool.run(programs.on_rank, grow, "adascale")
    for result in results:
        # The noise scale is 144: updates of 8, 16, 32 and 64 rows are below it.
        assert result["accumulation"] == 8
        assert 1e-3 < result["rate"] <= 8e-3
        assert result["logs"]["accumulation"][-1] == 8
        assert result["logs"]["batch_rows"][-1] == pytest.approx(64)
        assert result["rate"] == pytest.approx(1e-3 * result["logs"]["rate_gain"][-1])
        np.testing.assert_array_equal(result["w"], results[0]["w"])
    # 4 updates of 1 micro-step, then 4 or more of 2, of 4, and of 8 to the end.
    assert 30 < results[0]["updates"] < 96


def test_gain_is_between_one_and_the_scale():
    noisy, quiet = Noise(1e6, 1.0, 8, 1), Noise(1e-6, 1.0, 8, 1)
    assert adascale_gain(noisy, 8, 4) == pytest.approx(4, rel=1e-3)
    assert adascale_gain(quiet, 8, 4) == pytest.approx(1, rel=1e-3)
    # The variance of a batch equals the square of the gradient: (1 + 1) / (1 / 4 + 1).
    assert adascale_gain(Noise(8.0, 1.0, 8, 1), 8, 4) == pytest.approx(1.6)
    assert adascale_gain(Noise(8.0, -1.0, 8, 1), 8, 4) == pytest.approx(4)


def refuse(strategy):
    found = []
    for optimizer, callback in (
        (keras.optimizers.SGD(0.1), GradientNoise()),
        (keras.optimizers.SGD(0.1), AdaptiveBatch()),
        (
            keras.optimizers.SGD(
                keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.9),
                gradient_accumulation_steps=2,
            ),
            AdaptiveBatch(),
        ),
    ):
        model = quadratic(strategy, optimizer)
        with pytest.raises(ValueError) as caught:
            model.fit(*samples(8), verbose=0, callbacks=[callback])
        found.append(str(caught.value))
    return found


def test_what_cannot_be_measured_is_refused(one_process):
    parts, steps, schedule = one_process.run(programs.on_rank, refuse)[0]
    assert "gradient_accumulation_steps" in parts and "one rank" in parts
    assert "gradient_accumulation_steps" in steps and "start=1" in steps
    assert "a schedule" in schedule


def after_a_failed_fit(strategy):
    """What a strategy measures and accumulates once a `fit` has failed in its first step."""

    def fails(batch, logs):
        raise KeyError("of the test")

    model = quadratic(strategy, keras.optimizers.SGD(0.1, gradient_accumulation_steps=4))
    failing = keras.callbacks.LambdaCallback(on_train_batch_begin=fails)
    x, y = samples(32)
    with pytest.raises(KeyError):
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[AdaptiveBatch(), failing])
    return strategy.gradient_stages, active_hooks(model)


def test_nothing_is_left_by_a_fit_that_fails(one_process):
    assert one_process.run(programs.on_rank, after_a_failed_fit) == [([], [])]
