"""Mesh axes as data: those of a user's own, and the expert and context axes beside the data axis."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks, slow_but
from tests.strategies import programs
from tests.strategies.programs import scope, start
from tfdist import Axis, Mesh

FEATURES, HIDDEN = 6, 8


class SplitDense(keras.layers.Layer):
    """Y = X W, with the columns of W split over the ranks of an axis that tfdist has never seen."""

    def __init__(self, units: int, axis: str, **options):
        super().__init__(**options)
        self.units, self.axis = units, axis

    def build(self, input_shape):
        from tfdist.sharding.weights import add_split_weight, axis_group

        self._group = axis_group(self.axis) if tf.distribute.has_strategy() else None
        self.kernel = add_split_weight(
            self,
            (input_shape[-1], self.units),
            1,
            axis=self._group,
            name="kernel",
            initializer="glorot_uniform",
        )

    def call(self, inputs):
        from tfdist.collectives.mappings import copy_to_region, gather_from_region

        if self._group is None:
            return tf.matmul(inputs, self.kernel)
        return gather_from_region(
            tf.matmul(copy_to_region(inputs, self._group), self.kernel), self._group
        )


def train(strategy, *, split_over: str | None = None, optimizer: str = "adam", rows: int = 10):
    """Twenty steps; the global weights."""
    start()
    chance = np.random.default_rng(0)
    x = chance.normal(size=(rows, FEATURES)).astype("float32")
    y = chance.integers(0, 3, rows)
    with scope(strategy):
        hidden = keras.layers.Dense(HIDDEN, activation="relu", use_bias=False, name="hidden")
        if split_over is not None:
            hidden = SplitDense(HIDDEN, split_over, name="hidden")
        model = keras.Sequential(
            [keras.Input((FEATURES,)), hidden, keras.layers.ReLU(), keras.layers.Dense(3)]
        )
        rule = keras.optimizers.get(optimizer)
        rule.learning_rate = 0.01
        model.compile(rule, programs.cross_entropy(), metrics=["accuracy"])
    history = model.fit(x, y, batch_size=5, epochs=10, shuffle=False, verbose=0).history
    if strategy is None:
        return history, [np.asarray(weight) for weight in model.weights]
    from tfdist.sharding import whole_value

    return history, [whole_value(weight).numpy() for weight in model.weights]


def on_mesh(program, mesh, options):
    from tfdist.testing import strategy

    return program(strategy(mesh, **options))


def check(pool, one_process, program, mesh: Mesh, tolerance: float = 1e-5, **options):
    history, weights = one_process.run(programs.in_one_process, program)[0]
    for found, found_weights in pool.run(on_mesh, program, mesh, options, timeout=200):
        for name, values in history.items():
            np.testing.assert_allclose(found[name], values, rtol=tolerance, atol=tolerance)
        for own, reference in zip(found_weights, weights, strict=True):
            np.testing.assert_allclose(own, reference, rtol=tolerance, atol=tolerance)


RING = Axis("ring", "weights")


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("split", [False, True], ids=["dense", "split"])
def test_an_axis_of_ones_own_trains_as_one_process(pool, one_process, split):
    program = functools.partial(train, split_over="ring" if split else None)
    check(pool, one_process, program, Mesh(data=2, axes={RING: 2}))


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_zero_on_an_axis_of_ones_own(pool, one_process, zero_stage):
    program = functools.partial(train, split_over="ring")
    check(pool, one_process, program, Mesh(data=2, axes={RING: 2}), zero_stage=zero_stage)


@pytest.mark.slow
@on_ranks(("horovod", 4))
def test_an_axis_of_ones_own_divides_rows(pool, one_process):
    mesh = Mesh(data=2, axes={Axis("replica", "rows"): 2})
    check(pool, one_process, functools.partial(train, rows=11), mesh)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("zero_stage", slow_but([0, 3], [0, 2, 3]))
def test_experts_are_data_to_a_dense_model(pool, one_process, zero_stage):
    # 11 rows: the last batch leaves a rank without any.
    program = functools.partial(train, rows=11)
    check(pool, one_process, program, Mesh(data=1, expert=2), zero_stage=zero_stage)


class ComputedForOthers(keras.layers.Layer):
    """Y = X W, of which each rank of an axis of rows computes some columns, for the rows of all."""

    def __init__(self, units: int, axis: str, **options):
        super().__init__(**options)
        self.units, self.axis = units, axis

    def build(self, input_shape):
        from tfdist.sharding.weights import add_split_weight, axis_group

        self._group = axis_group(self.axis) if tf.distribute.has_strategy() else None
        self.kernel = add_split_weight(
            self,
            (input_shape[-1], self.units),
            1,
            axis=self._group,
            name="kernel",
            initializer="glorot_uniform",
            regularizer=keras.regularizers.L2(0.1),
        )

    def call(self, inputs):
        from tfdist.collectives import all_gather
        from tfdist.step.context import current_replica
        from tfdist.step.keras_step import with_global_gradient, with_local_gradient

        if self._group is None:
            return tf.matmul(inputs, self.kernel)
        replica = current_replica()
        step = None if replica is None else replica.step
        own = tf.shape(inputs)[:1]
        sizes = all_gather(own, self._group)
        rows = all_gather(with_local_gradient(inputs, step), self._group, uneven=True)
        columns = all_gather(tf.matmul(rows, self.kernel), self._group, axis=1)
        start = tf.reduce_sum(sizes[: self._group.rank])
        mine = columns[start : start + own[0]]
        mine.set_shape([inputs.shape[0], self.units])
        return with_global_gradient(mine, step)

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.units)


def train_for_others(strategy, *, rows: int = 11, optimizer: str = "sgd", **options):
    """Twenty steps; the global weights."""
    start()
    chance = np.random.default_rng(0)
    x = chance.normal(size=(rows, FEATURES)).astype("float32")
    y = chance.integers(0, 3, rows)
    with scope(strategy):
        stack = [
            keras.Input((FEATURES,)),
            keras.layers.Dense(HIDDEN, activation="tanh"),
            ComputedForOthers(HIDDEN, "expert", name="hidden"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(3),
        ]
        model = keras.Sequential(stack)
        rule = keras.optimizers.get(
            {"class_name": optimizer, "config": {"learning_rate": 0.05, **options}}
        )
        model.compile(rule, programs.cross_entropy(), metrics=["accuracy"])
    history = model.fit(x, y, batch_size=5, epochs=7, shuffle=False, verbose=0).history
    if strategy is None:
        return history, [np.asarray(weight) for weight in model.weights]
    from tfdist.sharding import whole_value

    return history, [whole_value(weight).numpy() for weight in model.weights]


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("zero_stage", slow_but([0], [0, 1, 2, 3]))
def test_a_weight_split_over_ranks_with_other_rows(pool, one_process, zero_stage):
    mesh = Mesh(data=1, expert=-1)
    check(pool, one_process, train_for_others, mesh, zero_stage=zero_stage)


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("options", [{"global_clipnorm": 0.1}, {"clipnorm": 0.05}])
def test_a_weight_split_over_some_of_them(pool, one_process, zero_stage, options):
    # Of 11 rows in batches of 5 the last has one row: three ranks of four have none.
    program = functools.partial(train_for_others, optimizer="adam", **options)
    check(pool, one_process, program, Mesh(data=2, expert=2), 2e-5, zero_stage=zero_stage)


TOKENS = 6


def train_tokens(strategy, *, masked: bool = False, layer: keras.layers.Layer | None = None):
    start()
    chance = np.random.default_rng(0)
    x = chance.integers(0 if masked else 1, 7, (9, TOKENS))
    y = chance.integers(0, 7, (9, TOKENS))
    with scope(strategy):
        inputs = keras.Input((None,), dtype="int32")
        hidden = keras.layers.Embedding(7, 8, mask_zero=masked)(inputs)
        hidden = keras.layers.LayerNormalization()(hidden)
        hidden = keras.layers.Dense(8, activation="gelu")(hidden)
        if not masked:  # Keras synchronizes no statistics of masked entries.
            hidden = keras.layers.BatchNormalization(synchronized=strategy is not None)(hidden)
        if layer is not None:
            hidden = layer(hidden)
        model = keras.Model(inputs, keras.layers.Dense(7)(hidden))
        model.compile(
            keras.optimizers.SGD(0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0).history
    history["evaluation"] = model.evaluate(x, y, batch_size=4, verbose=0)
    predictions = model.predict(x, batch_size=4, verbose=0)
    return history, [*map(np.asarray, model.get_weights()), predictions]


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("masked", slow_but([False], [False, True]), ids=["all", "masked"])
def test_tokens_are_split_where_layers_compute_them_one_by_one(pool, one_process, masked):
    program = functools.partial(train_tokens, masked=masked)
    check(pool, one_process, program, Mesh(data=1, context=-1), 2e-5)


@pytest.mark.slow
@on_ranks(("horovod", 4))
def test_rows_and_tokens(pool, one_process):
    check(pool, one_process, train_tokens, Mesh(data=2, context=2), 2e-5, zero_stage=3)


def refusal(layer) -> str:
    from tfdist.testing import strategy

    try:
        train_tokens(strategy(Mesh(data=1, context=-1)), layer=layer)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


@on_ranks(("horovod", 2))
def test_a_layer_that_mixes_tokens_is_refused_by_name(pool):
    for layer in (
        keras.layers.Conv1D(8, 3, padding="same", name="mixes"),
        keras.layers.LSTM(8, return_sequences=True, name="mixes"),
        keras.layers.Softmax(axis=1, name="mixes"),
        keras.layers.SpatialDropout1D(0.5, name="mixes"),
    ):
        for message in pool.run(refusal, layer, timeout=100):
            assert message.startswith("`mixes`") and "context" in message


def refusal_of_a_fixed_length() -> str:
    from tfdist.testing import strategy

    mesh = Mesh(data=1, context=-1)
    with strategy(mesh).scope():
        model = keras.Sequential([keras.Input((5, 2)), keras.layers.Dense(1)], name="stack")
        model.compile("sgd", "mse")
    try:
        model.fit(np.zeros((2, 5, 2)), np.zeros((2, 5, 1)), verbose=0)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


@on_ranks(("horovod", 2))
def test_a_fixed_length_is_refused(pool):
    for message in pool.run(refusal_of_a_fixed_length, timeout=100):
        assert "`stack` has an input of a fixed length" in message
