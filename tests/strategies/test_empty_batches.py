"""Ranks without samples, with layers whose kernels do not stand tensors without rows."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.conftest import skip_without
from tests.strategies import programs
from tfdist.testing import RankPool

#: The last batch of each epoch has one row: none for the other ranks.
ROWS, BATCH = 9, 4


def many_kernels():
    layers = keras.layers
    image = keras.Input((8, 8, 2))
    x = layers.Conv2D(4, 3, activation="relu")(image)
    x = layers.BatchNormalization(synchronized=True)(x)
    x = layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2)(x)
    x = layers.SeparableConv2D(6, 3, dilation_rate=2, padding="same")(x)
    x = layers.AveragePooling2D(2)(x)
    x = layers.Conv2DTranspose(4, 2, strides=2)(x)
    x = layers.MaxPooling2D(2)(x)
    x = layers.Conv3D(3, 2)(layers.Reshape((3, 3, 2, 2))(x))
    x = layers.Conv1D(5, 2)(layers.Reshape((4, 3))(x))
    x = layers.LayerNormalization()(layers.Dense(6, activation="gelu")(x))
    x = layers.LSTM(4)(x)
    return keras.Model(image, layers.Dense(3)(x))


def train(strategy, build):
    programs.start()
    random = np.random.default_rng(0)
    x, y = random.normal(size=(ROWS, 8, 8, 2)).astype("float32"), random.integers(0, 3, ROWS)
    with programs.scope(strategy):
        model = build()
        model.compile("sgd", programs.cross_entropy(), metrics=["accuracy"])
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return programs.finish(model, history, x, y, batch_size=BATCH)


def moving_mean() -> float:
    """Of a normalization that follows its own rank's rows: a row of ones, of threes, of fives."""
    from tfdist.testing import strategy

    programs.start()
    with strategy().scope():
        normalization = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((2,)), normalization])
        model.compile("sgd", "mse")
    x = np.array([[1.0, 1.0], [3.0, 3.0], [5.0, 5.0]], "float32")
    model.fit(x, x, batch_size=2, shuffle=False, verbose=0)
    return float(normalization.moving_mean[0])


@pytest.fixture(scope="module")
def ranks():
    """With oneDNN's kernels, also on machines for which TensorFlow would not take them."""
    skip_without("horovod")
    with RankPool(2, "horovod", environment={"TF_ENABLE_ONEDNN_OPTS": "1"}) as pool:
        yield pool


@pytest.mark.slow
def test_as_one_process(ranks, one_process):
    expected = one_process.run(train, None, many_kernels)[0]
    results = ranks.run(programs.on_rank, train, many_kernels, timeout=120)
    programs.assert_same(results, expected)


def test_a_rank_without_rows_keeps_its_statistics(ranks):
    # The first rank sees 1 and 5, the second 3 and nothing; what they follow begins with 0.
    first, second = 0.5 * (0.5 * 1) + 0.5 * 5, 0.5 * 3
    assert ranks.run(moving_mean) == [(first + second) / 2] * 2
