"""Operations that wait for a batch."""

from __future__ import annotations

import tensorflow as tf

from tests.gradients.test_throttle import ancestors
from tfdist.backend.graph.arrival import after_arrival, arrival


def test_what_does_not_take_the_batch_waits_for_it():
    with tf.Graph().as_default():
        batch = {"x": tf.compat.v1.placeholder(tf.float32, name="x"), "y": None, "n": 3}
        with after_arrival(batch):
            with arrival():
                own = tf.constant(1.0) * 2.0
            free = tf.constant(1.0) * 2.0
        with arrival():
            outside = tf.constant(3.0) * 2.0
    assert "x" in ancestors(own.op)
    assert "x" not in ancestors(free.op)
    assert "x" not in ancestors(outside.op)


def test_in_a_condition_too():
    with tf.Graph().as_default():
        batch = tf.compat.v1.placeholder(tf.float32, name="batch")

        def branch():
            with arrival():
                return tf.constant(1.0) * 2.0

        with after_arrival((batch,)):
            found = tf.cond(
                tf.compat.v1.placeholder(tf.bool, name="which"), branch, lambda: tf.constant(0.0)
            )
    assert "batch" in ancestors(found.op)


def test_eager_batches_have_come():
    with after_arrival(tf.constant(1.0)), arrival():
        assert float(tf.constant(2.0) * 2.0) == 4.0
