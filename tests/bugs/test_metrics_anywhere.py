"""Metrics that are read anywhere are those of all ranks.

The story: behind TensorFlow's own tutorial loop each rank read the accuracy of its own rows, and after
`evaluate` each `metric.result()` differed from the number that `evaluate` had returned. A metric whose
`result` returns its variable, as on the page of Keras' API, was each rank's own even in the history.
"""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.bugs.comparing import check, on_mesh, outcome
from tests.conftest import on_ranks, slow_but
from tests.strategies.programs import scope, start
from tfdist import Mesh

ROWS, BATCH = 13, 4  # The last batch leaves a rank without rows.


def rows():
    chance = np.random.default_rng(2)
    x = chance.normal(size=(ROWS, 3)).astype("float32")
    return x, (x.sum(axis=1) > 0).astype("float32")[:, None]


class TruePositives(keras.metrics.Metric):
    """Returns its variable, and in a dict another one."""

    def __init__(self, **options):
        super().__init__(**options)
        self.count = self.add_weight(initializer="zeros", name="count")

    def update_state(self, y_true, y_pred, sample_weight=None):
        hits = tf.cast(y_pred > 0.5, tf.float32) * tf.cast(y_true, tf.float32)
        self.count.assign_add(tf.reduce_sum(hits))

    def result(self):
        return self.count


class Several(TruePositives):
    def result(self):
        return {"count": self.count, "half": self.count / 2.0}


class Largest(keras.metrics.Metric):
    """Keeps a maximum."""

    def __init__(self, **options):
        super().__init__(**options)
        self.largest = tfdist.layers.set_aggregation(
            self.add_weight(initializer=keras.initializers.Constant(-1e9), name="largest"), "max"
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(y_pred)))

    def reset_state(self):
        self.largest.assign(-1e9)

    def result(self):
        return self.largest


def model_of(strategy, metrics):
    with scope(strategy):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "sigmoid")])
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=metrics())
    return model


class Reads(keras.callbacks.Callback):
    """Reads the metrics of the model at the end of epochs and of batches."""

    def __init__(self):
        super().__init__()
        self.seen: list[float] = []

    def _read(self):
        for metric in self.model.metrics[1:]:
            for value in tf.nest.flatten(metric.result()):
                self.seen += np.ravel(value).tolist()

    def on_epoch_end(self, epoch, logs=None):
        self._read()

    def on_train_batch_end(self, batch, logs=None):
        self._read()


def metrics():
    return [
        TruePositives(name="tp"),
        Several(name="several"),
        Largest(name="largest"),
        keras.metrics.AUC(name="auc"),
        keras.metrics.F1Score(threshold=0.5, name="f1"),
    ]


def fit_and_read(strategy):
    start()
    x, y = rows()
    model = model_of(strategy, metrics)
    reads = Reads()
    history = model.fit(
        x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[reads]
    ).history
    evaluation = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    reads._read()
    reads._read()
    return outcome(model, history, seen=reads.seen, evaluation=evaluation)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("horovod", 3)])
def test_in_callbacks_and_after_evaluate(pool, one_process):
    check(pool, one_process, fit_and_read)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("mesh", [Mesh(pipeline=2), Mesh(tensor=2)], ids=["pipeline", "tensor"])
def test_on_meshes(pool, one_process, mesh):
    check(pool, one_process, fit_and_read, mesh)


def tutorial_loop(strategy, *, eager: bool = False):
    """As in TensorFlow's guide on custom training loops."""
    start()
    x, y = rows()
    with scope(strategy):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "sigmoid")])
        accuracy = keras.metrics.BinaryAccuracy()
        mean = keras.metrics.Mean()
        hits = TruePositives()
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    if strategy is not None:
        data = strategy.experimental_distribute_dataset(data)

    def on_rank(x, y):
        p = model(x)
        accuracy.update_state(y, p)
        hits.update_state(y, p)
        mean.update_state(tf.reduce_sum(p, axis=-1))

    def step(x, y):
        return on_rank(x, y) if strategy is None else strategy.run(on_rank, args=(x, y))

    step = step if eager else tf.function(step, reduce_retracing=True)
    seen = []
    for _ in range(2):
        for batch in data:
            step(*batch)
            seen.append(float(accuracy.result()))
        seen += [float(metric.result()) for metric in (accuracy, mean, hits, hits)]
        for metric in (accuracy, mean, hits):
            metric.reset_state()
        seen.append(float(accuracy.result()))
    # Updated outside, by all ranks with all rows.
    counted = keras.metrics.BinaryAccuracy()
    counted.update_state(y, model(x))
    seen.append(float(counted.result()))
    return {"seen": seen}


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("horovod", 3)])
@pytest.mark.parametrize("eager", slow_but([False], [False, True]))
def test_in_a_loop(pool, one_process, eager):
    def program(strategy, eager=eager):
        return tutorial_loop(strategy, eager=eager)

    check(pool, one_process, program)


def reads_of_a_metric(strategy):
    """How many collectives reads take, and what is refused."""
    metric = keras.metrics.Mean()
    recorder = strategy.engine.recorder
    strategy.run(lambda: metric.update_state(float(strategy.mesh.rank)))
    counts = [recorder.progress()]
    for _ in range(3):
        metric.result()
        counts.append(recorder.progress())
    metric.update_state(1.0)
    strategy.run(lambda: metric.update_state(1.0))
    with pytest.raises(ValueError, match="reset_state"):
        metric.result()
    metric.reset_state()
    metric.update_state(3.0)
    return [after - before for before, after in itertools.pairwise(counts)], float(metric.result())


@on_ranks(("horovod", 2))
def test_a_read_is_a_collective_where_something_was_counted(pool):
    for reads, last in pool.run(on_mesh, reads_of_a_metric, Mesh(), {}, timeout=60):
        assert reads[0] > 0
        assert reads[1:] == [0, 0]
        assert last == 3.0
