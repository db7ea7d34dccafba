"""Cross-entropies of probabilities: Keras takes the logits behind them, also on many ranks.

The inputs are so large that softmax and sigmoid saturate. A loss that is computed of the
probabilities is then clipped, and its gradient zero.
"""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks, slow_but
from tests.strategies import programs
from tfdist.mesh import Mesh
from tfdist.pipeline import PipelineModel
from tfdist.recompute import recompute
from tfdist.testing import strategy

ROWS, CLASSES = 11, 3
LOSSES = {
    "sparse": ("softmax", "sparse_categorical_crossentropy"),
    "categorical": ("softmax", "categorical_crossentropy"),
    "binary": ("sigmoid", "binary_crossentropy"),
}
#: How a model is trained; "plain" is compared with, as one process trains it.
WAYS = ("plain", "zero-3", "recompute", "eager", "operation", "transposed")
KINDS = [("horovod", 3), ("tensorflow", 2)]
MORE_KINDS = [(engine, n) for engine in ("horovod", "tensorflow") for n in (1, 2, 3, 4)]


def batches(loss: str, rows: int):
    random = np.random.default_rng(3)
    x = (random.normal(size=(rows, 4)) * 300).astype("float32")
    labels = random.integers(0, CLASSES, rows)
    return x, labels if loss == "sparse" else np.eye(CLASSES, dtype="float32")[labels]


def probabilities(activation: str, way: str):
    if way == "operation":  # Known by the kind of the operation that makes them alone.
        return keras.layers.Lambda(getattr(tf.nn, activation))
    if way == "transposed" and activation == "softmax":  # By the attribute alone.
        return keras.layers.Softmax(axis=1)
    return keras.layers.Activation(activation)


def build(loss: str, way: str):
    layers = [
        keras.layers.Dense(5, activation="relu"),
        keras.layers.Dense(CLASSES),
        probabilities(LOSSES[loss][0], way),
    ]
    if way == "transposed":
        layers = [keras.layers.Reshape((4, 1)), keras.layers.Permute((2, 1)), *layers]
        layers.insert(-1, keras.layers.Permute((2, 1)))
        layers.append(keras.layers.Reshape((CLASSES,)))
    return keras.Sequential([keras.Input((4,)), *layers])


def train(
    strategy,
    loss: str,
    way: str = "plain",
    from_data_set: bool = False,
    batch: int = 5,
    rows: int = ROWS,
):
    programs.start()
    x, y = batches(loss, rows)
    with programs.scope(strategy):
        model = build(loss, way)
        if way == "recompute":
            model = recompute(model, "every_layer")
        if way == "pipeline":
            model = PipelineModel(model, num_microbatches=2)
        model.compile(
            keras.optimizers.SGD(1e-4),
            LOSSES[loss][1],
            metrics=["accuracy", LOSSES[loss][1]],
            run_eagerly=way == "eager",
        )
    options = {"epochs": 2, "verbose": 0}
    if from_data_set:
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)
        history = model.fit(data, **options)
    else:
        history = model.fit(x, y, batch_size=batch, shuffle=False, **options)
    result = programs.finish(model, history, x, y, batch_size=batch)
    if way == "pipeline":
        result.weights = {}  # Each rank's own; the evaluation sees them all.
    return result


def on_rank(mesh: Mesh, options: dict, *args, **kwargs):
    return train(strategy(mesh, **options), *args, **kwargs)


@functools.cache
def reference(one_process, loss: str, way: str, batch: int = 5):
    way = way if way in ("operation", "transposed", "eager") else "plain"
    (result,) = one_process.run(train, None, loss, way, batch=batch)
    # Clipped probabilities give 16.1 at most; the transposed ones Keras itself clips.
    assert way == "transposed" or result.history["loss"][0] > 30
    return result


@on_ranks(*KINDS, slow=[kind for kind in MORE_KINDS if kind not in KINDS])
@pytest.mark.parametrize(
    ("loss", "from_data_set"),
    slow_but(
        [("sparse", True)],
        [(loss, from_data_set) for loss in LOSSES for from_data_set in (False, True)],
    ),
)
def test_as_one_process(pool, one_process, loss, from_data_set):
    expected = reference(one_process, loss, "plain")
    results = pool.run(on_rank, Mesh(), {}, loss, "plain", from_data_set)
    programs.assert_same(results, expected, weights=2e-5)


@on_ranks(("horovod", 3), slow=[("tensorflow", 2)])
@pytest.mark.parametrize(
    ("loss", "way"),
    slow_but(
        [("binary", "recompute")],
        [(loss, way) for loss in LOSSES for way in WAYS[1:]],
    ),
)
def test_ways_to_train(pool, one_process, loss, way):
    options = {"zero_stage": 3} if way == "zero-3" else {}
    results = pool.run(on_rank, Mesh(), options, loss, way)
    programs.assert_same(results, reference(one_process, loss, way), weights=2e-5)


@pytest.mark.slow
@on_ranks(("horovod", 4), ("horovod", 2), ("tensorflow", 2))
@pytest.mark.parametrize("loss", LOSSES)
def test_pipeline(pool, one_process, loss):
    (expected,) = one_process.run(train, None, loss, "plain", batch=4, rows=8)
    results = pool.run(on_rank, Mesh(pipeline=2), {}, loss, "pipeline", batch=4, rows=8)
    expected.weights = {}
    programs.assert_same(results, expected, weights=2e-5)
