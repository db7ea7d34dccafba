"""Training programs that run alike on one process and on many ranks.

A program is a function of a strategy; what it returns (weights, history, evaluation, predictions)
is compared between worlds. They stand in a module of their own so that ranks can import them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

EVEN_ROWS, UNEVEN_ROWS, BATCH = 60, 50, 12  # The last of the uneven batches has two rows.
EPOCHS = 4  # Five batches each: twenty steps.


@dataclasses.dataclass
class Result:
    weights: dict[str, np.ndarray]
    history: dict[str, list[float]]
    evaluation: dict[str, float]
    predictions: list[np.ndarray]
    extra: Any = None


def images(rows: int, seed: int = 0):
    random = np.random.default_rng(seed)
    labels = random.integers(0, 4, rows)
    x = random.normal(size=(rows, 8, 8, 1)).astype("float32") + labels[:, None, None, None] / 4
    return x, labels


def mlp():
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(4),
        ]
    )


def convnet(synchronized: bool = True):
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Conv2D(6, 3, use_bias=False),
            keras.layers.BatchNormalization(synchronized=synchronized),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ]
    )


def two_in_two_out():
    left = keras.Input((6,), name="left")
    right = keras.Input((3,), name="right")
    hidden = keras.layers.Concatenate()(
        [keras.layers.Dense(8, activation="tanh")(left), keras.layers.Dense(8)(right)]
    )
    outputs = {
        "kind": keras.layers.Dense(3, name="kind")(hidden),
        "size": keras.layers.Dense(1, name="size")(hidden),
    }
    return keras.Model({"left": left, "right": right}, outputs)


def optimizer(name: str, **options):
    if name == "sgd":
        return keras.optimizers.SGD(0.05, momentum=0.9, **options)
    return keras.optimizers.AdamW(1e-3, weight_decay=0.01, **options)


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def scope(strategy):
    return strategy.scope() if strategy is not None else contextlib.nullcontext()


def start(seed: int = 7):
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)


def finish(model, history, x, y, *, extra=None, batch_size=BATCH, **evaluation) -> Result:
    measured = model.evaluate(
        x, y, batch_size=batch_size, verbose=0, return_dict=True, **evaluation
    )
    predictions = model.predict(x, batch_size=batch_size, verbose=0)
    return Result(
        {f"{i}/{w.path}": w.numpy() for i, w in enumerate(model.weights)},
        history.history if history is not None else {},
        measured,
        [np.asarray(part) for part in tf.nest.flatten(predictions)],
        extra,
    )


def train_images(strategy, build: str, optimizer_name: str, rows: int) -> Result:
    """A classifier on NumPy images, shuffled, with validation data."""
    start()
    x, y = images(rows)
    with scope(strategy):
        model = {"mlp": mlp, "convnet": convnet}[build]()
        model.compile(optimizer(optimizer_name), cross_entropy(), metrics=["accuracy"])
    history = model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        validation_data=images(25, seed=1),
    )
    return finish(model, history, x, y)


def train_two_in_two_out(strategy, optimizer_name: str, rows: int) -> Result:
    """A functional model with dicts of inputs and outputs, fed by tf.data."""
    start()
    random = np.random.default_rng(0)
    x = {
        "left": random.normal(size=(rows, 6)).astype("float32"),
        "right": random.normal(size=(rows, 3)).astype("float32"),
    }
    y = {
        "kind": random.integers(0, 3, rows),
        "size": random.normal(size=(rows, 1)).astype("float32"),
    }
    with scope(strategy):
        model = two_in_two_out()
        model.compile(
            optimizer(optimizer_name),
            {"kind": cross_entropy(), "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.5},
            metrics={"kind": ["accuracy"], "size": ["mae"]},
        )
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(rows, seed=5).batch(BATCH)
    history = model.fit(data, epochs=EPOCHS, verbose=0)
    return finish(model, history, x, y)


def on_rank(program, *args, **kwargs):
    """Runs a program on this rank under the pool's strategy."""
    from tfdist.testing import strategy

    return program(strategy(), *args, **kwargs)


def in_one_process(program, *args, **kwargs):
    """Runs a program without any strategy: plain Keras."""
    return program(None, *args, **kwargs)


@functools.cache
def reference(one_process, program):
    """The result of a program in the single process, which is run once."""
    return one_process.run(in_one_process, program)[0]


def assert_same(results, reference, *, weights: float = 1e-5, logs: float = 1e-5) -> None:
    """Every rank's result equals the reference, and the ranks agree bit for bit."""
    for rank, result in enumerate(results):
        compare(f"rank {rank} weights", result.weights, reference.weights, weights)
        compare(f"rank {rank} history", result.history, reference.history, logs)
        compare(f"rank {rank} evaluation", result.evaluation, reference.evaluation, logs)
        for got, expected in zip(result.predictions, reference.predictions, strict=True):
            # Predictions add up the differences of all weights of a layer.
            np.testing.assert_allclose(got, expected, atol=20 * weights, err_msg=f"rank {rank}")
        for name, value in result.weights.items():
            np.testing.assert_array_equal(value, results[0].weights[name], err_msg=f"{rank} {name}")


def compare(what: str, got: dict, expected: dict, tolerance: float) -> None:
    names = [name.partition("/")[2] or name for name in expected]
    assert len(got) == len(expected), f"{what}: {sorted(got)}, not {sorted(expected)}"
    for name, one, other in zip(names, got.values(), expected.values(), strict=True):
        np.testing.assert_allclose(
            np.asarray(one, "float64"),
            np.asarray(other, "float64"),
            atol=tolerance,
            rtol=tolerance,
            err_msg=f"{what} {name}",
        )
