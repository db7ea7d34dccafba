"""What a rank's memory does during a step of a pipeline."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

#: Rows of a micro-batch, and width of a layer: an activation of 4 MiB, and weights that are much smaller.
ROWS, WIDTH = 4096, 256
MIB = 1 << 20


def peak_of_a_step(mesh: dict, schedule: str, microbatches: int) -> float:
    """MiB above what the rank holds between steps; the least of some steps."""
    from tests.models.gpt_programs import scope
    from tfdist.addons.monitoring.memory import PeakMemory
    from tfdist.pipeline import PipelineModel

    keras.backend.clear_session()
    # Inputs and targets of one number a row, so that what the data takes does not count.
    layers = [keras.Input((1,)), keras.layers.Dense(WIDTH, name="widen")]
    for number in range(8):
        layers.append(keras.layers.Dense(WIDTH, activation="tanh", name=f"d{number}"))
    with scope(mesh):
        model = PipelineModel(layers, num_microbatches=microbatches, schedule=schedule)
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    rows = ROWS * microbatches
    data = tf.data.Dataset.from_tensors((tf.zeros([rows, 1]), tf.zeros([rows, 1])))
    found = []
    step = model.make_train_function() or model.train_function
    iterator = iter(data.repeat())
    step(iterator)
    for _ in range(3):
        with PeakMemory() as peak:
            step(iterator)
        found.append(peak.bytes / MIB)
    return float(np.min(found))
