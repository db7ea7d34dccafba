"""Losses that are no plain mean over samples, of a pipeline's micro-batches."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.strategies import programs
from tfdist.mesh import Mesh
from tfdist.pipeline import PipelineModel
from tfdist.testing import strategy

ROWS, BATCH = 16, 8
KINDS = [
    "sum",
    "each",
    "weights",
    "class_weights",
    "none",
    "over_weights",
    "ignored",
    "two_outputs",
]
REFUSED = {
    "mask": "a mask that earlier stages compute",
}


def build(kind: str):
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    if kind == "mask":
        layers = [
            keras.Input((4, 3)),
            keras.layers.Dense(2),
            keras.layers.Masking(),
            keras.layers.LSTM(3, return_sequences=True),
        ]
    if kind == "two_outputs":
        hidden = keras.layers.Dense(8, activation="tanh")(inputs := keras.Input((6,)))
        return keras.Model(inputs, [keras.layers.Dense(3)(hidden) for _ in range(2)])
    return keras.Sequential(layers)


def train(strategy, kind: str):
    programs.start()
    reductions = {"sum": "sum", "each": None, "over_weights": "mean_with_sample_weight"}
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, *((4, 3) if kind == "mask" else (6,)))).astype("float32")
    y = random.integers(0, 3, (ROWS, 4) if kind == "mask" else ROWS)
    weights = random.uniform(0, 2, ROWS).astype("float32")
    with programs.scope(strategy):
        model = build(kind)
        if strategy is not None:
            model = PipelineModel(model, num_microbatches=2)
        loss = programs.cross_entropy(reduction=reductions.get(kind, "sum_over_batch_size"))
        if kind == "ignored":
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
        if kind == "two_outputs":
            loss = [programs.cross_entropy(reduction="mean_with_sample_weight"), loss]
        metrics = None if kind == "two_outputs" else ["accuracy"]
        model.compile(keras.optimizers.SGD(0.02), loss, metrics=metrics)
    options: dict = {}
    if kind in ("weights", "over_weights"):
        options["sample_weight"] = weights
    if kind == "two_outputs":
        y = [y, (y + 1) % 3]
        options["sample_weight"] = [weights, weights[::-1].copy()]
    if kind == "class_weights":
        options["class_weight"] = {0: 1.0, 1: 3.0, 2: 0.5}
    history = model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, **options)
    evaluation = {k: options[k] for k in options if k == "sample_weight"}
    result = programs.finish(model, history, x, y, batch_size=BATCH, **evaluation)
    result.weights = {}
    return result


def on_rank(kind: str):
    return train(strategy(Mesh(pipeline=2)), kind)


@on_ranks(("horovod", 4), slow=[("horovod", 2), ("tensorflow", 2)])
@pytest.mark.parametrize("kind", slow_but(["weights"], KINDS))
def test_as_the_whole_model(pool, one_process, kind):
    (expected,) = one_process.run(train, None, kind)
    programs.assert_same(pool.run(on_rank, kind), expected)


@pytest.mark.slow
@on_ranks(("horovod", 4), ("horovod", 2))
@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_one_line(pool, kind):
    with pytest.raises(ValueError, match=REFUSED[kind]):
        pool.run(on_rank, kind)
