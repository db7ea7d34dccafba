"""Every rank's batch is of the same state of a data set that changes while it is iterated.

The story: a `PyDataset` shuffled its rows in `on_epoch_end`, and an epoch had fewer steps than it had
batches. Ranks had prepared some batches of the next epoch by then, each as many as it came to: half of a
global batch was of the old order and half of the new one, so rows were lost and others seen twice.
"""

from __future__ import annotations

import functools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.bugs.comparing import compare, on_mesh, outcome
from tests.conftest import on_ranks, slow_but
from tests.strategies.programs import in_one_process, scope, start
from tfdist import Mesh

LENGTH, STEPS, ROWS, EPOCHS = 7, 4, 5, 4
#: Epochs of four steps, of seven batches: each second epoch ends early.
ORDERS = [1] * 4 + [2] * 3 + [3] * 4 + [4] * 3


class Data(keras.utils.PyDataset):
    """Batches of the number of the epoch for which they were prepared."""

    def __init__(self, rank: int = 0, endless: bool = False, **options):
        super().__init__(**options)
        self.rank, self.endless, self.epoch = rank, endless, 0

    def __len__(self):
        return LENGTH

    @property
    def num_batches(self):
        return None if self.endless else LENGTH

    def __getitem__(self, index):
        time.sleep(0.004 * self.rank)  # Ranks are never equally fast.
        return np.full((ROWS, 1), self.epoch, "float32"), np.zeros((ROWS, 1), "float32")


class Changing(Data):
    def on_epoch_end(self):
        self.epoch += 1


class Range(keras.Sequential):
    """Logs the least and the largest number of the global batch."""

    def train_step(self, batch):
        x = self.distribute_strategy.gather(batch[0], axis=0)
        return {"least": tf.reduce_min(x), "most": tf.reduce_max(x)}

    test_step = train_step


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches: list[list[float]] = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append([logs["least"], logs["most"]])


def ranges(strategy):
    start()
    with strategy.scope():
        model = Range([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model, Seen()


def orders(strategy, *, steps_per_execution: int = 1, **options):
    model, seen = ranges(strategy)
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    data = Changing(strategy.mesh.rank, **options)
    model.fit(data, steps_per_epoch=STEPS, epochs=EPOCHS, callbacks=[seen], verbose=0)
    return seen.batches


WORKERS = {
    "one": {},
    "two": {"workers": 2},
    "short-queue": {"workers": 2, "max_queue_size": 2},
    "processes": {"workers": 2, "use_multiprocessing": True},
}


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("workers", slow_but(["one", "two"], WORKERS))
def test_no_batch_is_prepared_before_its_epoch(pool, workers):
    for seen in pool.run(on_mesh, functools.partial(orders, **WORKERS[workers]), Mesh(), {}):
        assert seen == [[order, order] for order in ORDERS]


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("workers", WORKERS)
def test_a_data_set_without_an_end(pool, workers):
    program = functools.partial(orders, endless=True, **WORKERS[workers])
    for seen in pool.run(on_mesh, program, Mesh(), {}):
        assert seen == [[order, order] for order in range(1, EPOCHS + 1) for _ in range(STEPS)]


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("workers", ["one", "two"])
def test_several_steps_in_one_execution(pool, workers):
    program = functools.partial(orders, steps_per_execution=2, endless=True, **WORKERS[workers])
    for seen in pool.run(on_mesh, program, Mesh(), {}):
        assert seen == [[order, order] for order in range(1, EPOCHS + 1) for _ in range(STEPS // 2)]


class Rows(Data):
    """Rows that stay as they are; the last batch is smaller."""

    def __getitem__(self, index):
        time.sleep(0.004 * self.rank)
        chance = np.random.default_rng(index)
        x = chance.normal(size=(ROWS - 4 * (index == LENGTH - 1), 3)).astype("float32")
        return x, x.sum(-1, keepdims=True)


def train(strategy, *, validation: bool = False, **options):
    start()
    with scope(strategy):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    rank = 0 if strategy is None else strategy.mesh.rank
    more = {}
    if validation:
        more = {"validation_data": Rows(rank, **options), "validation_steps": LENGTH}
    data = Rows(rank, **options)
    history = model.fit(data, steps_per_epoch=STEPS, epochs=EPOCHS, verbose=0, **more).history
    evaluated = model.evaluate(Rows(rank, **options), steps=3, verbose=0)
    predicted = model.predict(Rows(rank, **options), steps=LENGTH, verbose=0)
    return outcome(model, history, evaluated=evaluated, predicted=predicted)


#: Keras prepares the same batches in each run by one worker; more do so where all fit into their queue.
STEADY = {
    "one": {},
    "two": {"workers": 2},
    "processes": {"workers": 2, "use_multiprocessing": True},
}


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("workers", slow_but(["two"], STEADY))
@pytest.mark.parametrize("validation", slow_but([False], [False, True]))
def test_rows_that_stay_as_in_one_process(pool, one_process, workers, validation):
    expected = one_process.run(in_one_process, functools.partial(train, validation=validation))[0]
    program = functools.partial(train, validation=validation, **STEADY[workers])
    for rank, result in enumerate(pool.run(on_mesh, program, Mesh(), {}, timeout=200)):
        compare(f"rank {rank}", result, expected, 1e-5)


def curriculum(strategy, *, ends: str):
    """A variable that callbacks move is read by the pipeline."""
    model, seen = ranges(strategy)
    level = tf.Variable(1.0)

    def row(index):
        return tf.fill([1], level + 0.0 * tf.cast(index, tf.float32)), tf.zeros([1])

    data = tf.data.Dataset.range(1000).map(row).batch(ROWS)
    if ends == "prefetch":
        data = data.prefetch(tf.data.AUTOTUNE)
    elif ends == "inside":
        data = tf.data.Dataset.range(2).flat_map(lambda i: tf.data.Dataset.range(500).map(row))
        data = data.batch(ROWS).repeat()

    class Harder(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            time.sleep(0.05 * strategy.mesh.rank)
            level.assign_add(1.0)

    model.fit(data, steps_per_epoch=3, epochs=3, callbacks=[seen, Harder()], verbose=0)
    return seen.batches


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("ends", slow_but(["prefetch"], ["prefetch", "batch", "inside"]))
def test_ranks_read_a_variable_in_the_same_step(pool, ends):
    for seen in pool.run(on_mesh, functools.partial(curriculum, ends=ends), Mesh(), {}):
        compare("batches", seen, [[level, level] for level in (1, 1, 1, 2, 2, 2, 3, 3, 3)], 1e-6)


def read_ahead_is_kept(strategy):
    """Of what does not depend on when it is prepared, tables, seeds and constants among it."""
    from tfdist.data.read_ahead import is_drawn_when_needed

    words = keras.layers.StringLookup(vocabulary=["a", "b"])
    scale = keras.layers.Normalization(mean=1.0, variance=4.0)
    noise = keras.layers.RandomFlip(seed=3)
    draws = tf.random.Generator.from_seed(1)
    whole = tf.data.Dataset.range(20).batch(4)
    pipelines = [
        whole,
        whole.map(lambda i: words(tf.strings.as_string(i))),
        whole.map(lambda i: scale(tf.cast(i, tf.float32)[:, None])),
        whole.map(lambda i: noise(tf.ones([4, 2, 2, 1]))),
        whole.map(lambda i: draws.uniform([4])),
    ]
    distributed = map(strategy.experimental_distribute_dataset, pipelines)
    return [not is_drawn_when_needed(data) for data in distributed]


@on_ranks(("horovod", 2))
def test_what_does_not_change_is_still_read_ahead(pool):
    for kept in pool.run(on_mesh, read_ahead_is_kept, Mesh(), {}):
        assert kept == [True] * 5
