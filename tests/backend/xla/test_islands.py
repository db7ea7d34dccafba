"""The division of a graph into compiled parts: which operations, in which order, with which results."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.backend.graph.compiling import compiling, excluded
from tfdist.backend.keras.functional import trace_graph
from tfdist.backend.xla.emit import Compiler


def outside(x, log=None):
    """What no part may contain; its shape is that of its input."""
    with excluded():
        if log is None:
            return tf.identity(x) * 1.0
        y = tf.numpy_function(lambda value: log.append(float(np.sum(value))) or value, [x], x.dtype)
        return tf.ensure_shape(y, x.shape)


def work(x, times=8):
    for _ in range(times):
        x = tf.sin(x) * 1.25 + x
    return x


def compiled(function, *specs):
    """A function as a compiled one, and what was compiled of it."""
    with compiling():
        graph = trace_graph(function, specs)
    compiler = Compiler(graph)
    call = compiler.compile()
    captured = [captured for captured, _ in graph.captures]
    whole = tf.function(lambda *given: call(*given, *captured), autograph=False)
    whole.get_concrete_function(*specs)
    return whole, compiler.summary


VECTOR = tf.TensorSpec([6], tf.float32)


def test_one_part_without_anything_outside():
    whole, found = compiled(lambda x: (work(x), tf.reduce_sum(work(x))), VECTOR)
    assert (found.islands, found.others, found.obstacles) == (1, 0, [])
    # Whose sum is not near 0, where rounding is large.
    x = tf.random.stateless_normal([6], [0, 1])
    for got, right in zip(whole(x), (work(x), tf.reduce_sum(work(x))), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5)


def test_parts_are_equal_whatever_the_order_of_their_operations():
    def turned(x, backwards):
        rows = [lambda: tf.tanh(x), lambda: x * 2.0, lambda: tf.exp(x), lambda: x * 2.0]
        found = {place: rows[place]() for place in (range(4)[::-1] if backwards else range(4))}
        return found[0] * found[1] + found[2] / found[3]

    def chain(x):
        for number in range(4):
            x = outside(turned(x, number % 2 == 0))
        return x

    whole, found = compiled(chain, VECTOR)
    assert (found.islands, found.distinct) == (4, 1)
    x = tf.random.normal([6]) * 0.01 + 1.0
    np.testing.assert_allclose(whole(x)[0], chain(x), rtol=1e-4)


def test_equal_parts_are_compiled_once():
    def chain(x):
        for _ in range(6):
            x = outside(work(x))
        return x

    whole, found = compiled(chain, VECTOR)
    assert (found.islands, found.distinct) == (6, 1)
    x = tf.random.normal([6]) * 0.01
    expected = x
    for _ in range(6):
        expected = work(expected)
    np.testing.assert_allclose(whole(x)[0], expected, rtol=1e-4)


def test_equal_parts_of_variables_of_two_shapes_are_two():
    wide, narrow = tf.Variable(tf.ones([6])), tf.Variable(tf.ones([1]))

    def both(x):
        return outside(work(x * wide)), work(outside(x) * narrow)

    whole, found = compiled(both, VECTOR)
    assert found.distinct == found.islands == 2
    x = tf.random.normal([6])
    for got in whole(x):
        np.testing.assert_allclose(got, work(x), rtol=1e-5)


def test_parts_wait_only_for_what_they_need():
    """Of two chains the first waits in the middle, for what the end of the second one releases."""
    released = []

    def chains(x):
        def wait(value):
            released.append("asked")
            return value

        first = tf.numpy_function(wait, [work(x)], tf.float32)
        second = work(x * 2)
        return work(tf.ensure_shape(first, [6])), second

    _, found = compiled(chains, VECTOR)
    # Before the wait both chains, after it the first one alone.
    assert found.islands == 2 and [each.operation for each in found.obstacles] == ["PyFunc"]


def test_variables_are_read_before_and_after_they_change():
    state, count = tf.Variable(tf.ones([6])), tf.Variable(0)

    def step(x):
        before = work(state * x)
        state.assign(outside(before) * 0.5)
        count.assign_add(1)
        after = work(state + 0.0)
        state.assign_add(work(x))
        return before, after, state.read_value()

    @tf.function
    def plain(x):
        return step(x)

    x = tf.random.normal([6]) * 0.1
    expected = plain(x)
    values = state.numpy()
    state.assign(tf.ones([6]))
    whole, found = compiled(step, VECTOR)
    assert found.islands >= 2
    for got, right in zip(whole(x), expected, strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5)
    np.testing.assert_allclose(state, values, rtol=1e-5)
    assert int(count) == 2


def test_an_old_value_is_not_read_again_after_the_change():
    state = tf.Variable(tf.ones([6]))

    def step(x):
        old = state.read_value()
        state.assign(work(x))
        return work(old + tf.stop_gradient(outside(state.read_value())) * 0.0)

    whole, _ = compiled(step, VECTOR)
    np.testing.assert_allclose(whole(tf.zeros([6]) + 0.3)[0], work(tf.ones([6])), rtol=1e-5)


def test_branches_with_something_outside_have_parts():
    log = []

    def branches(x):
        return tf.cond(
            tf.reduce_sum(x) > 0,
            lambda: work(outside(work(x), log)),
            lambda: work(tf.zeros_like(x)),
        )

    whole, found = compiled(branches, VECTOR)
    assert found.islands == 3
    np.testing.assert_allclose(whole(tf.ones([6]))[0], work(work(tf.ones([6]))), rtol=1e-5)
    np.testing.assert_allclose(whole(-tf.ones([6]))[0], work(tf.zeros([6])))
    assert len(log) == 1


def test_loops_with_something_outside_have_parts():
    log = []

    def loop(x):
        return tf.while_loop(
            lambda i, x: i < 3, lambda i, x: (i + 1, work(outside(x, log)) * 0.1), (0, x)
        )[1]

    whole, found = compiled(loop, VECTOR)
    assert found.islands == 1
    x = expected = tf.random.normal([6])
    for _ in range(3):
        expected = work(expected) * 0.1
    np.testing.assert_allclose(whole(x)[0], expected, rtol=1e-4)
    assert len(log) == 3


def test_sizes_that_depend_on_values_stay_outside():
    def filtered(x):
        kept = tf.boolean_mask(work(x), x > 0)
        return work(tf.reduce_sum(work(kept))[None]), work(kept)

    whole, found = compiled(filtered, VECTOR)
    assert [each.operation for each in found.obstacles] == ["Where"]
    for _ in range(4):
        x = tf.random.normal([6])
        kept = tf.boolean_mask(work(x), x > 0)
        np.testing.assert_allclose(whole(x)[1], work(kept), rtol=1e-5)
        np.testing.assert_allclose(whole(x)[0], work(tf.reduce_sum(work(kept))[None]), rtol=1e-4)


def test_unknown_sizes_are_compiled_by_size():
    def sums(x):
        y = work(outside(x))
        rows = tf.shape(y)[0]
        return tf.reshape(y, [rows * 2, -1]), tf.zeros([rows, 3]) + tf.cast(rows, tf.float32)

    whole, found = compiled(sums, tf.TensorSpec([None, 2]))
    assert not found.obstacles
    for rows in (3, 5, 3):
        x = tf.random.normal([rows, 2])
        y, zeros = whole(x)
        np.testing.assert_allclose(y, tf.reshape(work(x), [-1, 1]), rtol=1e-5)
        np.testing.assert_array_equal(zeros, np.full([rows, 3], rows))


def test_what_is_computed_again_is_not_taken_from_before():
    from tensorflow.core.framework import attr_value_pb2

    from tfdist.backend.graph.compiling import AGAIN

    def twice(x):
        first = tf.sin(x) * 2.0
        second = tf.sin(x) * 2.0
        for op in (second.op, second.op.inputs[0].op):
            op._set_attr(AGAIN, attr_value_pb2.AttrValue(b=True))
        return work(first) + work(second)

    with compiling():
        graph = trace_graph(twice, [VECTOR])
    compiler = Compiler(graph)
    call = compiler.compile()
    found = []
    original = compiler.island

    def island(definition, outputs):
        found.extend(node.op for node in definition.graph_def.node)
        return original(definition, outputs)

    compiler.island = island
    x = tf.random.normal([6])
    np.testing.assert_allclose(tf.function(call)(x)[0], work(tf.sin(x) * 2.0) * 2, rtol=1e-5)
    assert found.count("XlaOptimizationBarrier") == 1


def test_an_error_inside_names_no_part():
    def fails(x):
        tf.debugging.assert_positive(x, message="must be positive")
        return work(x)

    whole, _ = compiled(fails, VECTOR)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be positive"):
        whole(-tf.ones([6]))


def test_branches_in_branches():
    log = []

    def inner(x):
        return tf.cond(x[0] > 0.5, lambda: work(outside(x, log)), lambda: work(x * 2))

    def outer(x):
        return tf.cond(x[0] > 0, lambda: work(inner(x)), lambda: work(tf.zeros_like(x)))

    whole, found = compiled(outer, VECTOR)
    assert found.islands >= 3
    for first in (1.0, 0.25, -1.0):
        x = tf.fill([6], first)
        np.testing.assert_allclose(whole(x)[0], outer(x), rtol=1e-4)


def test_variables_that_swap_their_values():
    first, second = tf.Variable(tf.ones([6])), tf.Variable(tf.fill([6], 2.0))

    def swap(x):
        one, two = first.read_value(), second.read_value()
        first.assign(outside(work(two)))
        second.assign(outside(work(one)))
        return work(one + x), work(two + x)

    whole, _ = compiled(swap, VECTOR)
    x = tf.random.normal([6])
    for got, old in zip(whole(x), (1.0, 2.0), strict=True):
        np.testing.assert_allclose(got, work(x + old), rtol=1e-4)
    np.testing.assert_allclose(first, work(tf.fill([6], 2.0)), rtol=1e-4)
    np.testing.assert_allclose(second, work(tf.ones([6])), rtol=1e-4)


def test_old_values_that_are_used_after_the_other_variable_has_changed():
    first, second = tf.Variable(tf.ones([6])), tf.Variable(tf.fill([6], 2.0))

    def step(x):
        one, two = first.read_value(), second.read_value()
        with tf.control_dependencies([second.assign(work(x)).op]):
            late = tf.numpy_function(lambda value: value, [one], tf.float32)
        with tf.control_dependencies([first.assign(work(x * 2)).op]):
            later = tf.numpy_function(lambda value: value, [two], tf.float32)
        return work(tf.ensure_shape(late, [6])), work(tf.ensure_shape(later, [6]))

    with compiling():
        graph = trace_graph(step, [VECTOR])
    call = Compiler(graph).compile()
    given = [captured for captured, _ in graph.captures]
    x = tf.random.normal([6])
    late, later = tf.function(lambda x: call(x, *given), autograph=False)(x)
    np.testing.assert_allclose(late, work(tf.ones([6])), rtol=1e-4)
    np.testing.assert_allclose(later, work(tf.fill([6], 2.0)), rtol=1e-4)


def test_what_nobody_uses_is_left_out():
    def step(x):
        outside(x)
        work(x + 1)
        return work(x) * 3

    _, found = compiled(step, VECTOR)
    assert (found.islands, found.others) == (1, 0)
