"""Trains small models with steps that XLA compiles, and with steps that it does not."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.strategies.programs import start

STEPS, ROWS, LENGTH, VOCABULARY = 20, 12, 16, 48


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        layout: The name of a layout.
        axes: The degrees of its mesh.
        engine: The engine.
        ranks: The number of ranks.
        optimizer: "sgd" or "adamw".
        modifier: What else the training does.
        options: The options of the strategy.
    """

    layout: str
    engine: str
    ranks: int = 2
    axes: tuple[tuple[str, int], ...] = ()
    optimizer: str = "sgd"
    modifier: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        words = (self.layout, self.modifier, self.optimizer, self.engine, str(self.ranks))
        return "-".join(filter(None, words))


class Custom(keras.Model):
    """A model with a training step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        strategy = self.distribute_strategy
        gradients, _ = strategy.clip_by_global_norm(gradients, self.trainable_variables, 1.0)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}


def gpt(case: Case, **options) -> keras.Model:
    return tfdist.models.gpt(
        VOCABULARY, num_layers=2, width=16, num_heads=2, max_length=LENGTH, **options
    )


def model_of(case: Case) -> keras.Model:
    layout = case.layout
    if layout == "sequence parallel":
        return gpt(case, sequence_parallel=True)
    if layout == "gathered context":
        return gpt(case, context_attention="all_gather")
    if layout == "experts":
        return gpt(case, num_experts=4)
    if layout.startswith("pipeline"):
        schedule = "interleaved" if "interleaved" in layout else "1f1b"
        inner = tfdist.models.gpt(
            VOCABULARY, num_layers=4, width=16, num_heads=2, max_length=LENGTH
        )
        return tfdist.pipeline.PipelineModel(
            inner, num_microbatches=4, schedule=schedule, input_shape=(LENGTH,)
        )
    if layout == "sparse embeddings":
        return keras.Sequential(
            [
                keras.Input((LENGTH,), dtype="int32"),
                keras.layers.Embedding(VOCABULARY, 8),
                keras.layers.BatchNormalization(),
                keras.layers.Dense(VOCABULARY),
            ]
        )
    if layout == "LoRA":
        inputs = keras.Input((LENGTH,), dtype="int32")
        dense = keras.layers.Dense(32, activation="gelu", name="hidden")
        x = dense(keras.layers.Embedding(VOCABULARY, 8)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(VOCABULARY, name="logits")(x))
        dense.enable_lora(2)
        return model
    model = gpt(case)
    if case.modifier == "custom train_step":
        return Custom(model.inputs, model.outputs)
    return model


def train(strategy, case: Case, jit_compile: bool) -> dict:
    """The losses and the weights of a rank after some steps."""
    start()
    if case.modifier == "loss scale":
        keras.config.set_dtype_policy("mixed_float16")
    accumulate = {"gradient_accumulation_steps": 2} if case.modifier == "accumulation" else {}
    make = {"sgd": lambda: keras.optimizers.SGD(0.1, **accumulate)}
    make["adamw"] = lambda: keras.optimizers.AdamW(0.003, **accumulate)
    try:
        with strategy.scope():
            model = model_of(case)
            model.compile(
                make[case.optimizer](),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
                jit_compile=jit_compile,
                steps_per_execution=3 if case.modifier == "steps per execution" else 1,
            )
    finally:
        keras.config.set_dtype_policy("float32")
    rows, epochs = ROWS * 10, 2
    if case.modifier == "odd batches":
        rows += 5
    if case.modifier == "ranks without rows":
        rows += 1
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (rows, LENGTH)).astype("int32")
    found = Said()
    with found:
        history = model.fit(
            ids, np.roll(ids, -1, 1), batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0
        )
    evaluated = model.evaluate(ids[:30], np.roll(ids[:30], -1, 1), batch_size=ROWS, verbose=0)
    weights = [np.array(weight, "float32") for weight in model.get_weights()]
    return {
        "losses": [*history.history["loss"], *np.ravel(evaluated)],
        "weights": weights,
        "parts": found.parts(),
    }


class Said(logging.Handler):
    """What tfdist logs inside."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self._logger = logging.getLogger("tfdist")

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        self._level = self._logger.level
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_):
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)

    def parts(self) -> list[tuple[int, ...]]:
        """By traced step: the numbers of compiled operations, parts, different parts, and other operations."""
        pattern = r"XLA compiles (\d+) .* in (\d+) parts \((\d+) different ones\); (\d+) run"
        found = (re.match(pattern, line) for line in self.lines)
        return [tuple(map(int, each.groups())) for each in found if each]


def compare(case: Case) -> dict:
    """A rank's differences between compiled steps and others, and the compiled parts."""
    plain, compiled = run(case, False), run(case, True)
    return {
        "differences": differences(compiled, plain),
        "parts": compiled["parts"],
        "uncompiled": plain["parts"],
    }


def rounding(case: Case) -> tuple[float, float]:
    """A rank's differences between two runs without compiled steps, with other buckets of gradients."""
    return differences(run(case, False, bucket_mib=0.001), run(case, False))


def run(case: Case, jit_compile: bool, **more) -> dict:
    from tfdist.testing import strategy

    axes: dict[str, Any] = dict(case.axes)
    mesh = tfdist.Mesh(**axes)
    return train(strategy(mesh, **dict(case.options), **more), case, jit_compile)


def differences(one: dict, other: dict) -> tuple[float, float]:
    """The largest differences of losses and of weights."""
    pairs = zip(one["weights"], other["weights"], strict=True)
    weights = max(float(np.max(np.abs(a - b), initial=0)) for a, b in pairs)
    return float(np.max(np.abs(np.subtract(one["losses"], other["losses"])))), weights
