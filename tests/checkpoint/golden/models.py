"""The models whose checkpoints of earlier versions are kept here, on any mesh."""

from __future__ import annotations

import contextlib

import keras
import numpy as np

from tests.models.gpt_programs import build, scope, text

ROWS, BATCH = 20, 8


def _digits(rows: int = ROWS):
    random = np.random.default_rng(1)
    return random.normal(size=(rows, 6)).astype("float32"), random.integers(0, 3, rows)


def _plain():
    """Layers that Keras named, of which two have the same shape."""
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(6, activation="relu"), layers.Dense(6), layers.Dense(3)]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, _digits()


def _named():
    """Names with numbers from the user and from Keras, in nested models, out of order."""
    layers = keras.layers
    inner = keras.Sequential(
        [keras.Input((4,)), layers.Dense(4, name="enc_2"), layers.Dense(4)], name="block_10"
    )
    inputs = keras.Input((6,))
    x = layers.Dense(4, name="dense_2")(inputs)
    x = layers.Dense(4, name="enc_1")(x)
    x = layers.Dense(4, name="dense_1")(inner(x))
    model = keras.Model(inputs, layers.Dense(3, name="head")(x))
    optimizer = keras.optimizers.AdamW(1e-2, weight_decay=0.1)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, _digits()


def _counting():
    """Random masks, moving averages, a loss scale and metrics."""
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.3),
            layers.Dense(3),
        ]
    )
    optimizer = keras.optimizers.AdamW(1e-2, weight_decay=0.1)
    model.compile(
        keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model, _digits()


def _gpt(mesh: dict | None):
    from tfdist import layers
    from tfdist.pipeline import PipelineModel, deferred_weights

    pipeline = (mesh or {}).get("pipeline", 1) > 1
    with deferred_weights() if pipeline else contextlib.nullcontext():
        model = build(31, num_layers=2, width=8, num_heads=2)
    if pipeline:
        model = PipelineModel(model, num_microbatches=2)
    optimizer = keras.optimizers.AdamW(3e-3, weight_decay=0.1, global_clipnorm=1.0)
    model.compile(optimizer, layers.VocabParallelCrossEntropy(31))
    return model, text(2 * BATCH, 31)


def _averaged():
    """Moving averages of weights beside the optimizer's moments."""
    model, data = _plain()
    optimizer = keras.optimizers.AdamW(1e-2, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, data


#: By name: what builds the model, and the mesh that its checkpoint was written on.
KINDS = {
    "plain": (lambda mesh: _plain(), None),
    "named": (lambda mesh: _named(), None),
    "counting": (lambda mesh: _counting(), {"data": 2}),
    "zero": (_gpt, {"zero_stage": 3}),
    "tensor": (_gpt, {"data": 1, "tensor": 2}),
    "pipeline": (_gpt, {"data": 1, "pipeline": 2}),
    "averaged": (lambda mesh: _averaged(), {"zero_stage": 2}),
}


def trained(kind: str, mesh: dict | None, callbacks=(), seed: int = 7):
    """A model of a kind after an epoch of two or three steps, so that all it has is built."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    with scope(mesh):
        model, data = KINDS[kind][0](mesh)
    model.fit(*data, batch_size=BATCH, epochs=1, shuffle=True, verbose=0, callbacks=[*callbacks])
    return model


def values_of(model: keras.Model) -> dict[str, np.ndarray]:
    """All that a model on one process has, numbered in Keras' order."""
    groups = {
        "model": model.variables,
        "optimizer": model.optimizer.variables,
        "metrics": [variable for metric in model.metrics for variable in metric.variables],
    }
    return {
        f"{group}/{number}": np.array(variable.numpy())
        for group, variables in groups.items()
        for number, variable in enumerate(variables)
    }
