"""Ranks whose batches differ are told so, once, and others are not.

The story: `ds.shard(size, rank)`, the habit of every script for Horovod, was left in. Lengths were equal,
so half of the rows were never seen, and nothing said so. Nor did anything for a forgotten scope, where
every rank trains by itself at as many times the cost.
"""

from __future__ import annotations

import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.bugs.comparing import on_mesh
from tests.conftest import on_ranks, slow_but
from tests.strategies.programs import start
from tfdist import Mesh
from tfdist.strategies.keras_patches import scopes

ROWS, BATCH = 22, 4


class Idle(keras.Model):
    """Takes batches of any kind."""

    def train_step(self, batch):
        return {"loss": tf.constant(0.0)}


def rows(width: int = 6):
    x = np.random.default_rng(5).normal(size=(ROWS, width)).astype("float32")
    return x, np.arange(ROWS)


def batches(x=None, *more):
    return tf.data.Dataset.from_tensor_slices((rows()[0] if x is None else x, *more)).batch(BATCH)


class Numbers(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return rows()


def cut_by_rank(strategy):
    whole = tf.data.Dataset.from_tensor_slices(rows())
    return whole.shard(strategy.mesh.size, strategy.mesh.rank).batch(BATCH)


def cut_arrays(strategy):
    x, _ = rows()
    return x[strategy.mesh.rank :: strategy.mesh.size][: ROWS // strategy.mesh.size]


def drawn_by_each(strategy):
    chance = np.random.default_rng(strategy.mesh.rank)  # As without a seed.

    class Noisy(Numbers):
        def __getitem__(self, index):
            x, y = rows()
            return x + chance.normal(size=x.shape), y

    return Noisy()


def late_difference(strategy):
    """Nothing but the last elements of a large batch differ."""
    x = np.zeros((BATCH, 30_000), "float32")
    x[:, 20_000:] = strategy.mesh.rank
    return x


UNLIKE = {each.__name__: each for each in (cut_by_rank, cut_arrays, drawn_by_each, late_difference)}


def generator(strategy):
    def draw():
        while True:
            yield rows()

    return draw()


def ragged(strategy):
    return batches(tf.RaggedTensor.from_row_splits([1.0, 2.0, 3.0], [0, 1, 1, 3]))


def sparse(strategy):
    return batches(tf.sparse.from_dense(rows()[0]))


def of_ranks_own(strategy):
    def own(context):
        return batches(rows()[0] + context.input_pipeline_id)

    return strategy.distribute_datasets_from_function(own)


def with_none(strategy):
    return batches().map(lambda x: {"a": None, "b": x})


ALIKE = {
    "arrays": lambda strategy: rows()[0],
    "shuffled": lambda strategy: batches().unbatch().shuffle(ROWS).batch(BATCH),
    "not-numbers": lambda strategy: batches(np.full((ROWS, 2), np.nan), np.full(ROWS, np.inf)),
    "strings": lambda strategy: batches(np.array(["word", ""] * (ROWS // 2))),
    "half": lambda strategy: batches(tf.cast(rows()[0], tf.bfloat16)),
    "dict": lambda strategy: batches({"x": rows()[0], "y": rows()[1]}),
    "py-dataset": lambda strategy: Numbers(),
    "py-dataset-workers": lambda strategy: Numbers(workers=2),
    "generator": generator,
    "ragged": ragged,
    "sparse": sparse,
    "with-none": with_none,
    "of-ranks-own": of_ranks_own,
}


def warned(strategy, *, data) -> list[int]:
    """How often it was warned after each of two calls of `fit`."""
    start()
    with strategy.scope():
        model = Idle()
        model.compile("sgd")
    found = []
    with mock.patch("absl.logging.warning") as warning:
        for _ in range(2):
            model.fit(data(strategy), steps_per_epoch=2, epochs=2, verbose=0)
            found.append(
                sum("a different first batch" in call.args[0] for call in warning.mock_calls)
            )
    return found


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("name", slow_but(["cut_by_rank"], UNLIKE))
def test_the_chief_is_warned_in_each_fit(pool, name):
    results = pool.run(on_mesh, functools.partial(warned, data=UNLIKE[name]), Mesh(), {})
    assert results == [[1, 2]] + [[0, 0]] * (len(results) - 1)


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("name", slow_but(["arrays", "with-none"], ALIKE))
def test_no_warning_of_equal_data(pool, name):
    for found in pool.run(on_mesh, functools.partial(warned, data=ALIKE[name]), Mesh(), {}):
        assert found == [0, 0]


def silenced(strategy):
    with mock.patch.dict("os.environ", {"TFDIST_COMPARE_BATCHES": "0"}):
        return warned(strategy, data=cut_by_rank)


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_it_can_be_silenced(pool):
    assert pool.run(on_mesh, silenced, Mesh(), {}) == [[0, 0]] * 2


def tokens(strategy):
    start()
    with strategy.scope():
        model = keras.Sequential([keras.Input((None, 3)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(4, 8, 3)).astype("float32")
    with mock.patch("absl.logging.warning") as warning:
        model.fit(x, x[..., :1], batch_size=2, verbose=0)
    return warning.call_count


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_no_warning_on_a_context_axis(pool):
    assert pool.run(on_mesh, tokens, Mesh(context=2), {}) == [0, 0]


def draws(strategy):
    """How many batches two steps have drawn of a generator, beyond those of which Keras takes the shape."""
    drawn = []

    def draw():
        while True:
            drawn.append(1)
            yield rows()

    warned(strategy, data=lambda strategy: draw())
    return len(drawn)


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_no_batch_is_drawn_for_it(pool):
    assert pool.run(on_mesh, draws, Mesh(), {}) == [2 * (2 * 2)] * 2


def forgets_scope(strategy, *, inside: bool):
    """How often it is said in two calls of `fit`; of `evaluate` and `predict` it is not."""
    start()
    scopes._has_warned = False
    x = np.ones((4, 2), "float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    if not inside:
        model = keras.models.clone_model(model)
        model.compile("sgd", "mse")
    said = []
    with mock.patch("absl.logging.warning") as warning:
        for call in (model.evaluate, model.fit, model.fit):
            call(x, x[:, :1], verbose=0)
            said.append(sum("created outside" in call.args[0] for call in warning.mock_calls))
        model.predict(x, verbose=0)
    return said


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("inside", [False, True])
def test_a_forgotten_scope_is_said_once(pool, inside):
    results = pool.run(on_mesh, functools.partial(forgets_scope, inside=inside), Mesh(), {})
    assert results == [[0, 0, 0] if inside else [0, 1, 1], [0, 0, 0]]


def test_nothing_is_said_of_one_process(one_process):
    assert one_process.run(on_mesh, functools.partial(forgets_scope, inside=False), Mesh(), {}) == [
        [0, 0, 0]
    ]
