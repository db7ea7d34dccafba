"""What `jit_compile` says of operations that XLA cannot compile, and what "auto" makes of them."""

from __future__ import annotations

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.bugs.comparing import on_mesh
from tests.conftest import on_ranks
from tests.parity.compiled.layouts import Said
from tests.strategies.programs import start

ROWS = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")


class Lookup(keras.layers.Layer):
    """Adds a number that a table has for the sign of each row."""

    def build(self, shape):
        keys, values = tf.constant([-1, 1], tf.int64), tf.constant([0.5, 1.5])
        self.table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(keys, values), 0.0
        )

    def call(self, x):
        signs = tf.cast(tf.where(x[:, :1] > 0, 1, -1), tf.int64)
        return x + self.table.lookup(signs)


class Python(keras.layers.Layer):
    """Multiplies by what Python computes."""

    def call(self, x):
        y = tf.py_function(lambda value: value * 0.0 + 2.0, [x], tf.float32)
        return x * tf.ensure_shape(y, x.shape)


class Excluded(Python):
    """The same, excluded from compilation."""

    def call(self, x):
        if tf.executing_eagerly():
            return super().call(x)
        with tf.xla.experimental.jit_scope(compile_ops=False):
            return super().call(x)


class Filter(keras.layers.Layer):
    """Subtracts the mean of the positive numbers."""

    def call(self, x):
        return x - tf.reduce_mean(tf.boolean_mask(x, x > 0))


@contextlib.contextmanager
def as_if_on_gpu():
    """Has Keras find a GPU where it decides whether to compile."""
    found = tf.config.list_physical_devices
    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    tf.config.list_physical_devices = lambda kind=None: [*found(kind), gpu]
    try:
        yield
    finally:
        tf.config.list_physical_devices = found


def train(strategy, layer, jit_compile):
    """Weights after some steps, and what tfdist said."""
    start()
    with strategy.scope(), as_if_on_gpu():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8), layer(name="special"), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", jit_compile=jit_compile)
    said = Said()
    with said:
        model.fit(ROWS, ROWS[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), bool(model.jit_compile), said.lines


@on_ranks(("tensorflow", 2), slow=[("horovod", 2)])
@pytest.mark.parametrize(
    ("layer", "operation"),
    [(Lookup, "LookupTableFind"), (Python, "EagerPyFunc"), (Filter, "Where")],
)
def test_true_raises_a_line_that_names_them(pool, layer, operation):
    with pytest.raises(ValueError, match=rf"the layer `special` with {operation}") as error:
        pool.run(
            on_mesh, functools.partial(train, layer=layer, jit_compile=True), tfdist.Mesh(), {}
        )
    assert "jit_compile=True" in str(error.value)


@on_ranks(("horovod", 2), ("local", 1), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("layer", [Lookup, Python, Filter])
def test_auto_leaves_them_out_with_one_warning(pool, one_process, layer):
    expected, _, _ = one_process.run(
        on_mesh, functools.partial(train, layer=layer, jit_compile=False), tfdist.Mesh(), {}
    )[0]
    results = pool.run(
        on_mesh, functools.partial(train, layer=layer, jit_compile="auto"), tfdist.Mesh(), {}
    )
    for weights, compiles, _ in results:
        assert compiles
        if layer is not Filter:  # Its mean is that of a rank's rows.
            for got, right in zip(weights, expected, strict=True):
                np.testing.assert_allclose(got, right, atol=1e-6)
    warnings = [line for line in results[0][2] if "does not compile" in line]
    assert len(warnings) == 1 and "`special`" in warnings[0]


@on_ranks(("tensorflow", 2), slow=[("horovod", 2)])
def test_what_is_excluded_is_no_obstacle(pool, one_process):
    expected = one_process.run(
        on_mesh, functools.partial(train, layer=Excluded, jit_compile=False), tfdist.Mesh(), {}
    )[0]
    results = pool.run(
        on_mesh, functools.partial(train, layer=Excluded, jit_compile=True), tfdist.Mesh(), {}
    )
    for weights, compiles, _ in results:
        assert compiles
        for got, right in zip(weights, expected[0], strict=True):
            np.testing.assert_allclose(got, right, atol=1e-6)
    assert any(line.startswith("XLA compiles") for line in results[0][2])


def every_call(strategy):
    """Loops of Keras other than `fit`, of a compiled model."""
    start()
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", jit_compile=True)
    y = ROWS[:, :1]
    return [
        np.asarray(model.train_on_batch(ROWS, y)),
        np.asarray(model.test_on_batch(ROWS, y)),
        np.asarray(model.evaluate(ROWS[:7], y[:7], batch_size=3, verbose=0)),
        model.predict(ROWS[:7], batch_size=3, verbose=0),
        model.predict_on_batch(ROWS),
    ]


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
def test_each_call_of_keras(pool, one_process):
    expected = one_process.run(on_mesh, every_call, tfdist.Mesh(), {})[0]
    for found in pool.run(on_mesh, every_call, tfdist.Mesh(), {}):
        for got, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, right, atol=1e-6)
