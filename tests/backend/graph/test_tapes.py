"""Which tapes record, and what a backward pass is asked for."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.graph.tapes import current_pass, is_wanted, others_record, passing


def test_another_tape_is_told_from_ones_own():
    x = tf.constant(2.0)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape(persistent=True) as inner:
            inner.watch(x)
            y = x * x
            assert others_record(inner)
        assert others_record(inner)
        inner.gradient(y, x)
    assert not others_record(inner)
    assert not others_record(outer)
    with tf.GradientTape(persistent=True) as alone:
        alone.watch(x)
        assert not others_record(alone)
        y = x * x
        # It records as before.
        assert float(alone.gradient(y, x)) == 4.0


def test_passes_have_numbers_and_sources():
    first, second = tf.Variable(1.0), tf.Variable(2.0)
    assert current_pass() is None
    assert is_wanted(first)
    with passing({"a": [first]}):
        outer = current_pass()
        assert is_wanted(first) and is_wanted(None, first) and not is_wanted(second)
        with passing(second):
            assert current_pass() != outer
            assert is_wanted(second) and not is_wanted(first)
        assert current_pass() == outer and is_wanted(first)
    assert current_pass() is None
