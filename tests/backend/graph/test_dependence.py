"""Which ids do not come from the batch."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.backend.graph.dependence import is_independent_of_batch, mark_independent

VARIABLE = tf.Variable([3, 1, 2], trainable=False)
CONSTANT = tf.constant([0, 1, 2])


def later(x):
    """The ids of a branch of a condition, whose graph takes them from outside."""
    ids = tf.range(tf.shape(x)[1])
    found = []

    def branch():
        found.append(is_independent_of_batch(ids + 1))
        return tf.constant(0)

    tf.cond(tf.shape(x)[0] > 2, branch, lambda: tf.constant(0))
    return found[0]


INDEPENDENT = {
    "constants": lambda x: tf.range(5) // 2,
    "made before": lambda x: CONSTANT,
    "a variable": lambda x: VARIABLE + 1,
    "the length": lambda x: tf.reshape(tf.range(tf.shape(x)[1]), [tf.size(tf.range(4)), -1]),
    "the last dim": lambda x: tf.range(tf.shape(x)[-1]),
    "reshaped by the batch": lambda x: tf.reshape(tf.range(6), [-1, tf.shape(x)[0]]),
}
DEPENDENT = {
    "the batch": lambda x: tf.reshape(tf.cast(x, tf.int32), [-1]),
    "its rows": lambda x: tf.range(tf.shape(x)[0]),
    "its rows, from the end": lambda x: tf.range(tf.shape(x)[-2]),
    "its shape": lambda x: tf.shape(x),
    "its size": lambda x: tf.range(tf.size(x)),
    "chance": lambda x: tf.random.uniform([4], maxval=5, dtype=tf.int32),
    "a broadcast of positions": lambda x: tf.range(3) + tf.zeros_like(tf.cast(x, tf.int32)),
    "a condition on the batch": lambda x: tf.cond(
        tf.reduce_sum(x) > 0, lambda: tf.range(2), lambda: tf.range(2) + 1
    ),
}


def verdict(ids_of) -> bool:
    found = []
    tf.function(
        lambda x: found.append(is_independent_of_batch(ids_of(x))),
        input_signature=[tf.TensorSpec([None, None])],
    ).get_concrete_function()
    return found[0]


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent(name):
    assert verdict(INDEPENDENT[name])


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent(name):
    assert not verdict(DEPENDENT[name])


def test_through_a_condition():
    found = []
    tf.function(
        lambda x: found.append(later(x)), input_signature=[tf.TensorSpec([None, None])]
    ).get_concrete_function()
    assert found == [True]


def test_marked():
    def ids_of(x):
        ids = tf.cast(x, tf.int32)
        mark_independent(ids)
        return tf.identity(ids)

    assert verdict(ids_of)
