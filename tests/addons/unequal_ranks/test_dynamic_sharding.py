"""Items that ranks take while they train: none is lost, none comes twice."""

from __future__ import annotations

import collections
import random
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks
from tests.strategies import programs
from tfdist.addons.unequal_ranks import DynamicSharding
from tfdist.addons.unequal_ranks.work_queue import Books


@pytest.mark.parametrize("seed", [None, 3])
def test_every_item_goes_to_one_taker(seed):
    books, draw = Books(50, 4, seed), random.Random(0)
    for epoch in range(3):
        taken = collections.defaultdict(list)
        waiting = {0, 1, 2, 3}
        while waiting:
            taker = draw.choice(sorted(waiting))
            item = books.take(epoch, taker, len(taken[taker]))
            if item is None:
                waiting.discard(taker)
            else:
                taken[taker].append(item)
        every = [item for items in taken.values() for item in items]
        assert sorted(every) == list(range(50))
        assert books.state(epoch) == [taken[taker] for taker in range(4)]


def test_who_asks_again_gets_the_same():
    books = Books(5, 2, None)
    assert [books.take(0, 0, 0), books.take(0, 1, 0), books.take(0, 0, 1)] == [0, 1, 2]
    assert [books.take(0, 0, 0), books.take(0, 0, 1)] == [0, 2]
    assert books.take(0, 0, 7) is None  # Nobody asks for the eighth before the third.
    assert books.take(0, 1, 1) == 3


def test_an_epoch_goes_on_from_a_checkpoint():
    books = Books(6, 2, 1)
    had = [books.take(4, 0, 0), books.take(4, 1, 0), books.take(4, 0, 1)]
    again = Books(6, 2, 1)
    again.restore(4, books.state(4))
    assert [again.take(4, 0, 0), again.take(4, 1, 0), again.take(4, 0, 1)] == had
    rest = [again.take(4, 1, number) for number in range(1, 4)]
    assert sorted(had + rest) == list(range(6))
    assert again.take(4, 1, 4) is None


def test_an_epoch_ends_when_all_are_through():
    books = Books(1, 3, None)
    books.made(0, 2, 4)
    books.ended(0, 0)
    assert books.goes_on(0, 3) is True
    assert books.goes_on(0, 4) is None
    books.ended(0, 1)
    books.made(0, 2, 5)
    assert books.goes_on(0, 4) is True
    assert books.goes_on(0, 5) is None
    books.ended(0, 2)
    assert books.goes_on(0, 4) is True
    assert books.goes_on(0, 5) is False


class Seen(keras.Model):
    """Counts the rows that it has trained on."""

    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(1)
        self.counts = tf.Variable(tf.zeros([31], tf.int32), trainable=False)

    def call(self, x):
        return self.head(x)

    def train_step(self, data):
        self.counts.scatter_add(tf.IndexedSlices(tf.ones_like(data[1]), tf.cast(data[1], tf.int32)))
        return super().train_step(data)


def take_in_turn(strategy):
    """Thirty-one rows in ranges of four; the second rank takes longer for each."""
    programs.start()
    with strategy.scope():
        model = Seen()
        model.compile("sgd", "mse")
    shards = DynamicSharding(31, strategy, chunk=4, shuffle_seed=5)

    def read(bounds):
        time.sleep(0.3 * strategy.row_group.rank)
        return np.arange(bounds[0], bounds[1], dtype=np.int32)

    def own(context):
        rows = shards.dataset().map(
            lambda b: tf.ensure_shape(tf.numpy_function(read, [b], tf.int32), [None])
        )
        rows = rows.unbatch().map(lambda row: (tf.cast(row, tf.float32)[None], row))
        return rows.batch(3)

    history = model.fit(shards.distribute(own), epochs=3, verbose=0)
    return model.counts.numpy(), len(history.epoch), shards.values(in_epoch=True)


@on_ranks(("tensorflow", 2), slow=[("horovod", 3)])
def test_ranks_take_what_is_next(pool):
    results = pool.run(programs.on_rank, take_in_turn)
    counts = sum(counts for counts, _, _ in results)
    assert counts.tolist() == [3] * 31
    assert all(epochs == 3 for _, epochs, _ in results)
    state = results[0][2]
    assert state["epoch"] == 2 and len(state["taken"][0]) >= len(state["taken"][1])
    assert sorted(item for items in state["taken"] for item in items) == list(range(8))


def take_files(strategy, files, growth=1, pause=0.0, **options):
    """Files of so many rows, in batches of two: by epoch the number of steps, and what was read.

    In the second epoch they have `growth` times as many rows. A rank with a file of more than 50 rows
    makes a pause for each batch.
    """
    programs.start()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    shards = DynamicSharding(files, strategy)
    rows = []

    def read(name):
        rows.append(int(name) * growth ** len(steps))
        return np.ones([rows[-1], 1], np.float32)

    def own(context):
        read_rows = shards.dataset().map(
            lambda name: tf.ensure_shape(tf.numpy_function(read, [name], tf.float32), [None, 1])
        )
        batches = read_rows.unbatch().map(lambda row: (row, row)).batch(2)
        return batches.map(
            lambda x, y: (tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape), y)
        )

    def wait(x):
        time.sleep(pause * (max(rows) > 50))
        return x

    steps, count = [], [0]

    def note(epoch, logs):
        steps.append(count[0])
        count[0] = 0

    def step(batch, logs):
        count[0] += 1

    counting = keras.callbacks.LambdaCallback(on_epoch_end=note, on_train_batch_end=step)
    model.fit(shards.distribute(own), verbose=0, callbacks=[counting], **options)
    return steps, rows


@on_ranks(("tensorflow", 2), slow=[("horovod", 3)])
def test_a_longer_epoch_is_not_cut(pool):
    results = pool.run(programs.on_rank, take_files, ["6"] * 8, growth=4, epochs=2)
    steps = [steps for steps, _ in results]
    assert all(each == steps[0] for each in steps)
    # Whoever takes what: one rank has a third of the rows at least, and none more than all.
    assert steps[0][0] <= 24 and steps[0][1] >= 32
    assert sum(sum(rows) for _, rows in results) == 48 + 4 * 48


@on_ranks(("tensorflow", 2), slow=[("horovod", 3)])
def test_a_fit_that_stops_early_waits_for_no_rank(pool):
    """The rank whose files are used up asks ahead for the batches of the one with the long file."""
    for _ in range(3):
        results = pool.run(
            programs.on_rank, take_files, ["60", "1"], pause=0.1, steps_per_epoch=4, timeout=60
        )
        assert all(steps == [4] for steps, _ in results)
