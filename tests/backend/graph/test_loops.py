"""Whether one of TensorFlow's loops calls a function."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.backend.graph.loops import is_called_by_loop, is_called_for_rows

ROWS = [[1.0], [2.0]]


def in_a_while_loop(ask):
    tf.while_loop(lambda i: i < 2, lambda i: ask(i) + 1, [tf.constant(0)])


def in_autograph(ask):
    for i in tf.range(3):
        ask(i)


def in_a_map(ask):
    tf.map_fn(ask, tf.constant(ROWS))


def in_a_vectorized_map(ask):
    tf.vectorized_map(ask, tf.constant(ROWS))


def in_a_jacobian(ask):
    @tf.custom_gradient
    def own(x):
        return x * x, lambda dy: ask(2.0 * x * dy)

    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = own(x)
    tape.jacobian(y, x)


def in_no_loop(ask):
    tf.cond(tf.constant(True), lambda: ask(tf.constant(1)), lambda: tf.constant(0))


@pytest.mark.parametrize(
    ("call", "by_loop", "for_rows"),
    [
        (in_a_while_loop, True, False),
        (in_autograph, True, False),
        (in_a_map, True, True),
        (in_a_vectorized_map, True, True),
        (in_a_jacobian, True, True),
        (in_no_loop, False, False),
    ],
)
def test_loops_are_seen_in_graphs(call, by_loop, for_rows):
    found = []

    def ask(x):
        found.append((is_called_by_loop(), is_called_for_rows()))
        return x

    tf.function(lambda: call(ask), autograph=False)() if call is not in_autograph else tf.function(
        in_autograph
    ).get_concrete_function(ask)
    assert set(found) == {(by_loop, for_rows)}


def test_loops_outside_of_a_function_do_not_count():
    found = []

    def inner():
        found.append(is_called_by_loop(inner.__code__))

    def call():
        return tf.map_fn(lambda x: (inner(), x)[1], tf.constant(ROWS))

    tf.function(call, autograph=False)()
    assert found and not any(found)
