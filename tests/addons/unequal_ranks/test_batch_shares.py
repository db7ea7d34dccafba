"""Ranks that get unequal parts of each batch: results stay those of one process."""

from __future__ import annotations

import json
import os
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks, slow_but
from tests.strategies import programs
from tfdist.callbacks import Checkpointer
from tfdist.step.shares import MeasuredShares, parts_of
from tfdist.testing import RankError


def with_shares(strategy, shares):
    """Another strategy over the same engine; None stays plain Keras."""
    if strategy is None:
        return None
    return type(strategy)(engine=strategy.engine, batch_shares=shares)


def fixed(strategy, build, rows):
    shared = None
    if strategy is not None:
        shares = [3, 1, 2][: strategy.row_group.size]
        shared = with_shares(strategy, shares)
        np.testing.assert_allclose(shared.batch_shares, np.array(shares) / sum(shares), atol=1e-6)
    return programs.train_images(shared, build, "sgd", rows)


@on_ranks(("tensorflow", 2), slow=[("horovod", 3)])
@pytest.mark.parametrize("build", ["mlp", "convnet"])
def test_fixed_shares_train_as_one_process(pool, one_process, build):
    expected = one_process.run(programs.in_one_process, fixed, build, programs.UNEVEN_ROWS)[0]
    results = pool.run(programs.on_rank, fixed, build, programs.UNEVEN_ROWS)
    programs.assert_same(results, expected)


class ChangingShares(keras.callbacks.Callback):
    """Gives ranks other shares before every third step, some of them no row at all."""

    PARTS = ((1, 1), (3, 1), (1, 30), (7, 5), (100, 1))

    def __init__(self, shares):
        super().__init__()
        self._shares, self.steps = shares, 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.steps % 3 == 0:
            self._shares.set_parts(parts_of(self.PARTS[self.steps // 3 % len(self.PARTS)]))
        self.steps += 1


def changing(strategy, build, kind, rows):
    """Sixty steps."""
    shared = with_shares(strategy, "measured")
    programs.start()
    x, y = programs.images(rows)
    with programs.scope(shared):
        model = {"mlp": programs.mlp, "convnet": programs.convnet}[build]()
        model.compile(programs.optimizer("sgd"), programs.cross_entropy(), metrics=["accuracy"])
    changes = [] if shared is None else [ChangingShares(shared.row_shares)]
    options = {"epochs": 12, "verbose": 0, "callbacks": changes}
    history = model.fit(*fed(kind, x, y), **options)
    assert not changes or changes[0].steps == 60
    return programs.finish(model, history, x, y)


def fed(kind, x, y):
    """The arguments of `fit` for batches of 12 rows, by the kind of input."""
    if kind == "tf.data":
        return (tf.data.Dataset.from_tensor_slices((x, y)).shuffle(20, seed=3).batch(12),)
    return (Batches(x, y),) if kind == "PyDataset" else (x, y, 12)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self._x, self._y = x, y

    def __len__(self):
        return -(-len(self._x) // 12)

    def __getitem__(self, index):
        rows = slice(12 * index, 12 * index + 12)
        return self._x[rows], self._y[rows]


@on_ranks(("tensorflow", 2), slow=[("horovod", 2)])
@pytest.mark.parametrize(
    ("build", "kind"),
    slow_but(
        [("mlp", "NumPy")],
        [("mlp", "NumPy"), ("convnet", "NumPy"), ("mlp", "tf.data"), ("mlp", "PyDataset")],
    ),
)
def test_changing_shares_train_as_one_process(pool, one_process, build, kind):
    rows = programs.UNEVEN_ROWS
    expected = one_process.run(programs.in_one_process, changing, build, kind, rows)[0]
    programs.assert_same(pool.run(programs.on_rank, changing, build, kind, rows), expected)


class Slow(keras.layers.Layer):
    """Takes some time for each row."""

    def __init__(self, seconds):
        super().__init__()
        self._seconds = seconds

    def call(self, x):
        def wait(rows):
            time.sleep(self._seconds * len(rows))
            return rows

        found = tf.numpy_function(wait, [x], x.dtype)
        found.set_shape(x.shape)
        return found

    def compute_output_shape(self, shape):
        return shape


def measured(strategy, steps, **options):
    """The second rank takes twice as long for a row."""
    shared = with_shares(strategy, MeasuredShares(**options))
    programs.start()
    x, y = programs.images(24 * steps)
    with shared.scope():
        slow = Slow(0.004 * (1 + shared.row_group.rank))
        model = keras.Sequential(
            [keras.Input((8, 8, 1)), slow, keras.layers.Flatten(), keras.layers.Dense(4)]
        )
        model.compile("sgd", programs.cross_entropy())
    model.fit(x, y, batch_size=24, epochs=1, verbose=0, shuffle=False)
    return shared.batch_shares


@on_ranks(("tensorflow", 2), slow=[("horovod", 2)])
def test_shares_follow_the_measured_speed(pool):
    # A limit of one's own, so that what else runs on the machine takes no room.
    shares = pool.run(programs.on_rank, measured, 40, max_rows=1000)
    assert shares[0] == shares[1]
    assert 0.58 < shares[0][0] < 0.72  # Two thirds, where rows were all that takes time.


@pytest.mark.slow
@on_ranks(("tensorflow", 2))
def test_no_rank_gets_more_than_its_most(pool):
    shares = pool.run(programs.on_rank, measured, 30, max_rows=[13, 24])
    np.testing.assert_allclose(shares[0][0], 13 / 24, atol=1e-5)


class Killed(keras.callbacks.Callback):
    """Notes the shares of the first step; ends the process at a step, as a host that fails does."""

    def __init__(self, shares, folder, at):
        super().__init__()
        self._shares, self._folder, self._at = shares, folder, at
        self.first = None

    def on_train_batch_begin(self, batch, logs=None):
        self.first = self.first or self._shares.values(in_epoch=True)
        if batch == self._at:
            (self._folder / "state.json").write_text(json.dumps(self._shares.values(in_epoch=True)))
            os.kill(os.getpid(), signal.SIGKILL)


def interrupted(strategy, folder, at):
    """Forty steps; the second rank takes twice as long for a row."""
    programs.start()
    x, y = programs.images(24 * 40)
    shared = with_shares(strategy, "measured")
    with programs.scope(shared):
        slow = Slow(0.001 * (0 if strategy is None else 1 + shared.row_group.rank))
        model = keras.Sequential([keras.Input((8, 8, 1)), slow, *programs.mlp().layers])
        model.compile(programs.optimizer("adamw"), programs.cross_entropy())
    if strategy is None:
        model.fit(x, y, batch_size=24, verbose=0)
        return model.get_weights(), None
    saver = Checkpointer(folder / "saves", every_steps=5, asynchronous=False)
    killed = Killed(shared.row_shares, folder, at)
    model.fit(x, y, batch_size=24, verbose=0, callbacks=[saver, killed])
    return model.get_weights(), killed.first


@pytest.mark.slow
@on_ranks(("tensorflow", 2), ("horovod", 2))
def test_a_killed_training_goes_on_with_its_shares(pool, one_process, tmp_path):
    with pytest.raises(RankError):
        pool.run(programs.on_rank, interrupted, tmp_path, 12, timeout=240)
    kept = json.loads((tmp_path / "state.json").read_text())
    assert kept["parts"][0] > 1.1 * kept["parts"][1]
    weights, _ = one_process.run(programs.in_one_process, interrupted, tmp_path, None)[0]
    for own, first in pool.run(programs.on_rank, interrupted, tmp_path, None, timeout=240):
        assert first == kept
        for got, expected in zip(own, weights, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)
