"""Trainings in which a rank gets a bit wrong."""

from __future__ import annotations

import logging

import keras
import numpy as np

from tests.layers.gpt_programs import build, scope, text


def spoilt(mesh: dict, fault: dict | None, **options) -> dict:
    """What a rank says and ends with, of a training with a fault.

    Args:
        mesh: The mesh.
        fault: Arguments of `FlipBit`; None for none.
        **options: Of `VerifyModelSync`.
    """
    from tfdist import layers, monitoring
    from tfdist.monitoring.model_sync import ModelSyncError
    from tfdist.testing import FlipBit

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with scope(mesh):
        model = build(num_layers=1)
        model.compile(keras.optimizers.Adam(), layers.VocabParallelCrossEntropy(61))
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record):
            said.append(record.getMessage())

    handler, logger = Handler(), logging.getLogger("tfdist")
    logger.addHandler(handler)
    callbacks = [monitoring.VerifyModelSync(**options)]
    if fault is not None:
        callbacks.append(FlipBit(**fault))
    outcome: dict = {"error": None}
    try:
        # Of 22 rows the last batch has 6: not all ranks have as many.
        history = model.fit(*text(22, 61), batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
        outcome["losses"] = history.history["loss"]
    except ModelSyncError as error:
        outcome |= {
            "error": str(error),
            "is_transient": error.is_transient,
            "ranks": error.ranks,
            "code": error.exit_code,
        }
    finally:
        logger.removeHandler(handler)
    outcome["said"] = [line for line in said if "come apart" in line]
    outcome["weights"] = [np.array(v.numpy()) for v in model.trainable_variables]
    return outcome
