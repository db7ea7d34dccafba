"""Chance: what ranks must draw alike, what they must not, and what follows from one seed."""

from __future__ import annotations

import itertools
import os
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks
from tests.strategies import programs
from tests.strategies.programs import BATCH, UNEVEN_ROWS, finish, images, scope, start
from tfdist.data.random_state import global_seed, operation_seeds
from tfdist.strategies.keras_patches.synchronization import broadcast_variables

on_kinds = on_ranks(("horovod", 3), slow=[("tensorflow", 3)])


def mlp_with_dropout():
    return keras.Sequential(
        [
            keras.layers.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(16, "tanh"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(4),
        ]
    )


def compiled(strategy, build=mlp_with_dropout):
    with scope(strategy):
        model = build()
        model.compile(programs.optimizer("sgd"), programs.cross_entropy(), metrics=["accuracy"])
    return model


def seed_states(model) -> list[list[int]]:
    states = [v for v in model.variables if v.name == "seed_generator_state"]
    return [state.numpy().tolist() for state in states]


def train_with_dropout(strategy):
    start()
    x, y = images(UNEVEN_ROWS)
    model = compiled(strategy)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    return finish(model, history, x, y, extra=seed_states(model))


@on_kinds
def test_one_seed_gives_the_same_run_again(pool):
    """Also a rank without samples in the last batch has moved its seeds as the others have."""
    first, second = (pool.run(programs.on_rank, train_with_dropout) for _ in range(2))
    for results in (first, second):
        programs.assert_same(results, first[0], weights=0, logs=0)
        assert [result.extra for result in results] == [[[first[0].extra[0][0], 10]]] * 3


def test_local_strategy_is_plain_keras(one_process):
    (plain,) = one_process.run(programs.in_one_process, train_with_dropout)
    (local,) = one_process.run(programs.on_rank, train_with_dropout)
    programs.assert_same([local], plain, weights=0, logs=0)
    assert local.extra == plain.extra


def shuffle_again(strategy):
    """Three trainings, each on data that are shuffled without a seed of their own."""
    start()
    x, y = images(UNEVEN_ROWS)
    model, logs = compiled(strategy, programs.mlp), []
    for _ in range(3):
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(UNEVEN_ROWS).batch(BATCH)
        logs.append(model.fit(data, epochs=2, verbose=0).history["loss"])
    history = model.fit(x, y, batch_size=BATCH, verbose=0)
    return finish(model, history, x, y, extra=logs)


@on_kinds
def test_data_of_each_fit_are_shuffled_as_in_one_process(pool, one_process):
    """The chief drew one more seed in each `fit`, so from the second on ranks had other batches."""
    (plain,) = one_process.run(programs.in_one_process, shuffle_again)
    results = pool.run(programs.on_rank, shuffle_again)
    programs.assert_same(results, plain, weights=1e-5, logs=1e-5)
    for result in results:
        np.testing.assert_allclose(result.extra, plain.extra, rtol=1e-5)


def test_where_tensorflow_keeps_seeds():
    """`global_seed` draws nothing; what is drawn afterwards follows from what was put back."""
    tf.random.set_seed(7)
    before = operation_seeds().getstate()
    assert global_seed() == 7 and operation_seeds().getstate() == before
    drawn = tf.compat.v1.get_seed(None)
    assert operation_seeds().getstate() != before
    operation_seeds().setstate(before)
    assert tf.compat.v1.get_seed(None) == drawn


def draw_masks(strategy):
    """What is left of ones, in three steps."""
    start()
    with scope(strategy):
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dropout(0.5)])

    @tf.function
    def drop():
        return model(tf.ones((4, 64)), training=True)

    return [strategy.run(drop).numpy() for _ in range(3)]


@on_kinds
def test_data_ranks_drop_different_units(pool):
    masks = [mask for steps in pool.run(programs.on_rank, draw_masks) for mask in steps]
    for mask in masks:
        assert set(np.unique(mask)) == {0, 2}
        assert 0.35 < np.mean(mask == 0) < 0.65
    for one, other in itertools.combinations(masks, 2):
        # Draws that know nothing of each other agree in half of the units.
        assert 0.35 < np.mean(one == other) < 0.65


def differ_by_rank():
    """What a fresh process is without a seed: Python and NumPy seed themselves, each another."""
    keras.backend.clear_session()
    random.seed(os.getpid())
    np.random.seed(os.getpid())
    tf.random.set_seed(None)


def train_without_seed(strategy):
    """Shuffles arrays in `fit`, and then a data set of its own, with dropout in both."""
    differ_by_rank()
    # In a script the strategy comes first, as the ranks do not share chance before it is made.
    strategy = type(strategy)(engine=strategy.engine, watchdog_seconds=0)
    x, y = images(UNEVEN_ROWS)
    model = compiled(strategy)
    first = {w.path: w.numpy() for w in model.weights}
    model.fit(x, y, batch_size=BATCH, epochs=1, verbose=0)
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(UNEVEN_ROWS).batch(BATCH)
    history = model.fit(data, epochs=2, verbose=0)
    return finish(model, history, x, y, extra=first)


@pytest.mark.slow
@on_kinds
def test_ranks_agree_without_a_seed(pool):
    results = pool.run(programs.on_rank, train_without_seed)
    programs.assert_same(results, results[0], weights=0, logs=0)
    for result in results:
        for path, value in result.extra.items():
            np.testing.assert_array_equal(value, results[0].extra[path], err_msg=path)


@on_kinds
def test_another_run_without_a_seed_is_another(pool):
    runs = [pool.run(programs.on_rank, start_without_seed)[0] for _ in range(2)]
    assert np.abs(runs[0] - runs[1]).max() > 1e-3


def start_without_seed(strategy):
    keras.backend.clear_session()
    random.seed()
    strategy = type(strategy)(engine=strategy.engine, watchdog_seconds=0)
    return compiled(strategy).get_weights()[0]


def weights_of_the_chief(strategy):
    """The chief alone has read weights from somewhere; every rank has drawn what it likes."""
    start()
    x, y = images(UNEVEN_ROWS)
    model = compiled(strategy, programs.mlp)
    loaded = [np.random.default_rng(5).normal(0, 0.3, w.shape) for w in model.weights]
    if strategy is None or strategy.is_chief:
        model.set_weights(loaded)
    else:
        differ_by_rank()
        model.set_weights([np.random.normal(size=w.shape) for w in model.weights])
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    return finish(model, history, x, y)


def distances_between_weights(strategy):
    """How many bytes lie between weights of 64 bytes, once ranks have agreed on them."""
    start()
    with scope(strategy):
        layer = keras.layers.Layer()
        for number in range(8):
            layer.add_weight(shape=(16,), name=f"weight{number}")
        model = keras.Sequential([keras.Input((4,)), layer])
    broadcast_variables(model)
    values = [tf.convert_to_tensor(weight.value) for weight in model.weights]
    places = sorted(np.asarray(memoryview(value)).ctypes.data for value in values)
    return [after - before for before, after in itertools.pairwise(places)]


@on_kinds
def test_weights_do_not_keep_the_bucket_that_they_came_in(pool):
    for distances in pool.run(programs.on_rank, distances_between_weights):
        assert len(distances) == 7
        assert 64 not in distances, "parts of one array"


@on_kinds
def test_training_starts_from_the_chiefs_weights_and_seeds(pool, one_process):
    expected = programs.reference(one_process, weights_of_the_chief)
    programs.assert_same(pool.run(programs.on_rank, weights_of_the_chief), expected)
