"""Pipelines whose stages wait instead of computing: schedules of more ranks than a machine has cores.

What a stage takes is known then to the millisecond and takes no core, so that what a step takes beside
is the schedule's. Messages, the order of actions and the optimizer are those of any `PipelineModel`.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable

#: Of a rank's forward pass, of its backward pass to its inputs, and of that to its weights.
SECONDS = (0.06, 0.06, 0.04)
_WIDTH, _STEPS = 64, 4

#: A rank does one thing at a time. TensorFlow knows functions by name, as long as they live.
_busy = threading.Lock()
_functions: list[Callable] = []


def _wait(tensor, seconds: float):
    """The tensor, after a while."""
    import tensorflow as tf

    def function(value):
        with _busy:
            time.sleep(seconds)
        return value

    _functions.append(function)
    found = tf.numpy_function(function, [tensor], tensor.dtype)
    found.set_shape(tensor.shape)
    return found


def _waiting(tensor, forward: float, backward: float):
    """The tensor, which takes so long there, and its gradient so long back."""
    import tensorflow as tf

    @tf.custom_gradient
    def function(x):
        y = _wait(x, forward) if forward else tf.identity(x)
        return y, lambda gradient: _wait(gradient, backward)

    return function(tensor)


def _stage_layer(name: str, chunks: int):
    import keras
    import tensorflow as tf

    class Waiting(keras.layers.Layer):
        """Adds its weights, and waits."""

        def build(self, shape):
            self.scale = self.add_weight(shape=(shape[-1],), initializer="zeros", name="scale")

        def call(self, x):
            forward, inputs, weights = (each / chunks for each in SECONDS)
            own = _waiting(tf.convert_to_tensor(self.scale), 0.0, weights)
            return _waiting(x, forward, inputs) + own

    return Waiting(name=name)


def train_waiting(schedule: str, microbatches: int, chunks: int) -> tuple[float, float]:
    """Trains some steps on this rank and the others of its pool.

    Returns:
        The median seconds of a step, and the share of them in which ranks were idle.
    """
    import keras
    import tensorflow as tf

    from tfdist import Mesh
    from tfdist.launch.plan.trials import fit_begins, median_interval
    from tfdist.pipeline import PipelineModel
    from tfdist.testing import strategy

    found = strategy(Mesh(data=1, pipeline=-1))
    stages = found.engine.size * chunks
    with found.scope():
        # The first stage has no gradient of inputs to send back, but one of what its first layer makes.
        layers = [keras.layers.Dense(_WIDTH, name="first")]
        layers += [_stage_layer(f"stage{place}", chunks) for place in range(stages)]
        model = PipelineModel(
            [keras.Input((_WIDTH,)), *layers],
            num_microbatches=microbatches,
            schedule=schedule,
            chunks=chunks if chunks > 1 else None,
            cut=[2] + [1] * (stages - 1),
            timed=True,
        )
        model.compile(keras.optimizers.SGD(1e-3), "mse")
    x = tf.zeros([microbatches, _WIDTH])
    data = tf.data.Dataset.from_tensors((x, x)).repeat()
    seconds = median_interval(fit_begins(model, data, _STEPS + 2))
    shares = []
    for _ in range(3):
        model.fit(data, steps_per_epoch=1, verbose=0)
        shares.append(model.last_run().idle_share)
    return seconds, statistics.median(shares)
