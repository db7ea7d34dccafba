"""Gradients wait for those that travel before them, and for nothing that they are made of."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.gradients.throttle import MAX_IN_FLIGHT, MAX_IN_FLIGHT_SHARDED, InFlightLimit


def ancestors(operation: tf.Operation) -> set[str]:
    found: set[str] = set()
    waiting = [operation]
    while waiting:
        each = waiting.pop()
        if each.name not in found:
            found.add(each.name)
            waiting += [tensor.op for tensor in each.inputs] + list(each.control_inputs)
    return found


def paced(make, max_in_flight: int = 2) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Gradients made by a function of their number, and what each becomes."""
    limit = InFlightLimit(max_in_flight)
    gradients = [make(number) for number in range(6)]
    reduced = []
    for number, gradient in enumerate(gradients):
        limit.begin([gradient])
        reduced.append(tf.negative(gradient, name=f"reduced{number}"))
        limit.end(reduced[-1:])
    return gradients, reduced


@pytest.mark.parametrize("max_in_flight", [MAX_IN_FLIGHT, MAX_IN_FLIGHT_SHARDED])
def test_each_waits_for_the_bucket_before_those_max_in_flight(max_in_flight):
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [])
        gradients, reduced = paced(lambda number: tf.multiply(x, float(number)), max_in_flight)
        for number, gradient in enumerate(gradients):
            waited_for = [i for i, r in enumerate(reduced) if r.op.name in ancestors(gradient.op)]
            assert waited_for == list(range(number % max_in_flight, number, max_in_flight))


def test_what_others_are_made_of_does_not_wait():
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [])
        chain = [tf.multiply(x, 2.0)]
        for _ in range(5):
            chain.append(tf.multiply(chain[-1], 2.0))
        # The last first: each of the others is made of those that travel after it.
        gradients, reduced = paced(lambda number: chain[5 - number])
        for gradient in gradients:
            assert not any(r.op.name in ancestors(gradient.op) for r in reduced)


def test_a_function_with_paced_gradients_runs():
    @tf.function
    def step(x):
        _, reduced = paced(lambda number: x * float(number))
        return tf.add_n(reduced)

    assert float(step(tf.constant(2.0))) == -30.0
