"""Trainings in which a rank gets a bit wrong."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import keras
import numpy as np

from tests.models.gpt_programs import build, scope, text
from tfdist.callbacks import VerifyModelSync


def spoilt(mesh: dict, fault: dict | None, **options) -> dict:
    """What a rank says and ends with, of a training with a fault.

    Args:
        mesh: The mesh.
        fault: Arguments of `FlipBit`; None for none.
        **options: Of `VerifyModelSync`.
    """
    from tfdist import layers
    from tfdist.addons.monitoring.model_sync import ModelSyncError
    from tfdist.pipeline import PipelineModel, deferred_weights
    from tfdist.testing.faults import FlipBit

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    # Of 22 rows the last batch has 6: not all ranks have as many. Micro-batches have to be equal.
    x, y = text(24 if mesh.get("pipeline") else 22, 61)
    with scope(mesh):
        if mesh.get("pipeline"):
            with deferred_weights():
                model = build(num_layers=2)
            model = PipelineModel(model, num_microbatches=2)
        elif mesh.get("tensor"):
            model = build(num_layers=1)
        else:
            model = keras.Sequential(
                [
                    keras.Input([16], dtype="int32"),
                    keras.layers.Embedding(61, 8),
                    keras.layers.LayerNormalization(),
                    keras.layers.Dense(61),
                ]
            )
        model.compile(keras.optimizers.Adam(), layers.VocabParallelCrossEntropy(61))
    callbacks = [VerifyModelSync(**options)]
    if fault is not None:
        callbacks.append(FlipBit(**fault))
    outcome: dict = {"error": None}
    with _heard() as said:
        try:
            history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
            outcome["losses"] = history.history["loss"]
        except ModelSyncError as error:
            outcome |= {
                "error": str(error),
                "is_transient": error.is_transient,
                "ranks": error.ranks,
                "code": error.exit_code,
            }
    outcome["said"] = [line for line in said if "not in sync" in line]
    outcome["weights"] = [np.array(v.numpy()) for v in model.trainable_variables]
    return outcome


def even(steps: int) -> tuple[list[float], list[str]]:
    """The losses of the epochs of a training without a fault, and what is said; looks every 10 steps."""
    from tfdist.testing import strategy

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(0)
    x = random.normal(size=(803, 16)).astype("float32")
    y = np.sin(x.sum(axis=1, keepdims=True))
    with strategy().scope():
        layers = [
            keras.layers.Dense(32, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
        ]
        model = keras.Sequential([keras.Input([16]), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(1e-3, clipnorm=1.0, use_ema=True), "mse")
    with _heard() as said:
        # Steps of 8 rows, of which the last of an epoch has 3.
        history = model.fit(
            x,
            y,
            batch_size=8,
            epochs=-(-steps // 101),
            verbose=0,
            callbacks=[VerifyModelSync(every_steps=10)],
        )
    return history.history["loss"], [line for line in said if "not in sync" in line]


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """What is logged inside."""
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("tfdist")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
