"""What a rank's memory does during a step of a pipeline."""

from __future__ import annotations

import threading

import keras
import numpy as np
import psutil
import tensorflow as tf

#: Rows of a micro-batch, and width of a layer: an activation of 4 MiB.
ROWS, WIDTH = 1024, 1024
MIB = 1 << 20


class Peak:
    """The highest resident size of this process while it is open, beyond that at the start."""

    def __enter__(self):
        self._process = psutil.Process()
        self._over = threading.Event()
        self.before = self.peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over.wait(0.0005):
            self.peak = max(self.peak, self._process.memory_info().rss)

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    @property
    def mebibytes(self) -> float:
        return (self.peak - self.before) / MIB


def peak_of_a_step(mesh: dict, schedule: str, microbatches: int) -> float:
    """MiB above what the rank holds between steps; the least of some steps."""
    from tests.layers.gpt_programs import scope
    from tfdist.pipeline import PipelineModel

    keras.backend.clear_session()
    layers = [keras.Input((WIDTH,))]
    for number in range(8):
        layers.append(keras.layers.Dense(WIDTH, activation="tanh", name=f"d{number}"))
    with scope(mesh):
        model = PipelineModel(layers, num_microbatches=microbatches, schedule=schedule)
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    rows = ROWS * microbatches
    # Targets of one number a row, broadcast by the loss, and inputs made on the way: what the data
    # takes must not grow with what is measured.
    data = tf.data.Dataset.from_tensors(0).map(
        lambda _: (tf.zeros([rows, WIDTH]), tf.zeros([rows, 1]))
    )
    found = []
    step = model.make_train_function() or model.train_function
    iterator = iter(data.repeat())
    for _ in range(2):
        step(iterator)
    for _ in range(3):
        with Peak() as peak:
            step(iterator)
        found.append(peak.mebibytes)
    return float(np.min(found))
