"""What tests of the Monitor run, alone or on ranks."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

from tfdist import models
from tfdist.addons.monitoring import timer
from tfdist.backend.graph.order import in_any_order
from tfdist.callbacks import Monitor
from tfdist.testing import strategy

__all__ = [
    "Begins",
    "dense",
    "fit_gpt",
    "fit_with_a_sleeper",
    "hand_count_of_gpt",
    "of_epoch",
    "sleepy_fit",
    "traced_fit",
]

VOCABULARY, LAYERS, WIDTH, HEADS, LENGTH = 64, 2, 64, 4, 32


class Begins(keras.callbacks.Callback):
    """When steps began, as another callback sees it that stands before the Monitor."""

    def __init__(self):
        super().__init__()
        self.at: list[float] = []

    def on_train_batch_begin(self, batch, logs=None):
        self.at.append(time.perf_counter())

    def on_epoch_end(self, epoch, logs=None):
        self.at.append(time.perf_counter())

    def mean(self) -> float:
        """The mean time of a step, without the first, which makes the graph."""
        return (self.at[-1] - self.at[1]) / (len(self.at) - 2)


def of_epoch(monitor: Monitor):
    """The report of the last epoch."""
    return [report for report in monitor.reports if report.kind == "epoch"][-1]


def dense(width: int = 256, activation: str = "relu", **options) -> keras.Model:
    """A network of three products."""
    layers = [keras.layers.Dense(width, activation=activation) for _ in range(2)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, **options)
    return model


def hand_count_of_gpt(rows: int) -> float:
    """The operations of a step of the GPT below: 2 for each weight and position forward, 4 backward."""
    positions = rows * LENGTH
    block = 4 * WIDTH * WIDTH + 2 * WIDTH * 4 * WIDTH
    attention = 2 * LENGTH * WIDTH
    return 3 * 2 * positions * (LAYERS * (block + attention) + WIDTH * VOCABULARY)


def fit_gpt(mesh=None, steps: int = 40, rows: int = 8, **options) -> dict[str, Any]:
    """Trains a small GPT on this rank's mesh, and says what the Monitor said."""
    keras.utils.set_random_seed(0)
    with strategy(mesh).scope():
        model = models.gpt(
            VOCABULARY, num_layers=LAYERS, width=WIDTH, num_heads=HEADS, max_length=LENGTH
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (steps * rows, LENGTH), "int32")
    monitor, begins = Monitor(16, show=False, **options), Begins()
    history = model.fit(
        tokens, tokens, batch_size=rows, verbose=0, shuffle=False, callbacks=[begins, monitor]
    )
    report = of_epoch(monitor)
    return {
        "logs": {name: values[-1] for name, values in history.history.items()},
        "sections": report.sections,
        "ranks": report.ranks,
        "tokens": report.logs["tokens_per_second"] * report.logs["step_seconds"],
        "flops": report.logs["model_flops_per_second"] * report.logs["step_seconds"],
        "step": report.logs["step_seconds"],
        "begins": begins.mean(),
    }


def sleepy_fit(where: str, seconds: float, model: keras.Model, steps: int = 24) -> Any:
    """Trains with a sleep in one place of each step; returns the report of the epoch."""

    class Sleeper(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if where == "callbacks":
                time.sleep(seconds)
            elif where == "augment":
                with timer("augment"):
                    time.sleep(seconds)

    def data():
        width = model.input_shape[-1]
        for _ in range(steps + 1):
            if where == "input":
                time.sleep(seconds)
            yield np.ones((8, width), "float32"), np.ones(8, "int32")

    monitor = Monitor(show=False)
    model.fit(data(), steps_per_epoch=steps, verbose=0, callbacks=[monitor, Sleeper()])
    return of_epoch(monitor)


def fit_with_a_sleeper(slow: int | None, where: str, seconds: float, steps: int) -> list[str]:
    """Trains with a sleep on one rank; returns the warnings, each behind the step at which it came."""
    import logging

    shared = strategy()
    keras.utils.set_random_seed(0)
    with shared.scope():
        model = dense(64)
    at = {"step": 0}
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record):
            found.append(f"{at['step']} {record.getMessage()}")

    class Sleeper(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            at["step"] = batch + 1
            if shared.mesh.rank == slow and batch >= 30:
                if where == "callbacks":
                    time.sleep(seconds)
                elif where == "augment":
                    with timer("augment"):
                        time.sleep(seconds)

    handler = Handler()
    logging.getLogger("tfdist").addHandler(handler)
    x, y = np.ones((steps * 8, 64), "float32"), np.ones(steps * 8, "int32")
    try:
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[Monitor(show=False), Sleeper()])
    finally:
        logging.getLogger("tfdist").removeHandler(handler)
    return [line for line in found if "is slow" in line]


def traced_fit(path: str, mesh=None, skew: float = 0.0, width: int = 64) -> dict[str, Any]:
    """Trains a GPT with a trace, on ranks whose clocks are `skew` seconds apart from rank to rank."""
    import tensorflow as tf

    from tfdist.pipeline import PipelineModel

    shared = strategy(mesh)
    ahead = skew * shared.mesh.rank
    right_time, right_stamp = time.time, tf.timestamp
    keras.utils.set_random_seed(0)
    with shared.scope():
        model: Any = models.gpt(
            VOCABULARY, num_layers=4, width=width, num_heads=HEADS, max_length=LENGTH
        )
        if shared.mesh.shape["pipeline"] > 1:
            model = PipelineModel(model, num_microbatches=2, input_shape=(LENGTH,))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (30 * 8, LENGTH), "int32")
    monitor = Monitor(8, show=False, trace=path, steps=(10, 14))

    def stamp_ahead():
        now = right_stamp()
        if not tf.executing_eagerly():
            # What comes of it is marked so by `time_after`.
            in_any_order(now.op)
        return now + ahead

    time.time, tf.timestamp = lambda: right_time() + ahead, stamp_ahead
    try:
        model.fit(tokens, tokens, batch_size=8, verbose=0, callbacks=[monitor])
    finally:
        time.time, tf.timestamp = right_time, right_stamp
    return {"rank": shared.mesh.rank, "hidden": of_epoch(monitor).logs["communication_hidden"]}
