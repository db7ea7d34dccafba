"""Stamps in a graph: when something is there, and nothing else."""

from __future__ import annotations

import time

import pytest
import tensorflow as tf

from tfdist.backend.clock.stamps import time_after


def test_a_stamp_waits_for_its_tensors_alone():
    """TensorFlow runs operations with an effect in the order in which they were traced."""
    slept = []

    def sleep(x):
        time.sleep(0.3)
        slept.append(time.time())
        return x

    @tf.function
    def stamps(x):
        slow = tf.numpy_function(sleep, [x], x.dtype, stateful=False)
        return time_after([slow]), time_after([x]), slow  # TensorFlow drops what nobody uses.

    stamps(tf.constant(1.0))
    late, early, _ = stamps(tf.constant(1.0))
    assert float(early) < slept[-1] <= float(late) <= time.time()


def test_a_stamp_is_taken_at_each_call_and_eagerly():
    @tf.function
    def stamp(x):
        return time_after([x])

    x = tf.constant(1.0)
    assert float(stamp(x)) < float(stamp(x)) < float(time_after([x])) <= time.time()


def test_a_tensorflow_that_has_moved_is_told(monkeypatch):
    from tensorflow.python.framework.auto_control_deps import AutomaticControlDependencies

    monkeypatch.delattr(AutomaticControlDependencies, "run_independently")
    told = pytest.raises(ImportError, match=r"requires Graph.experimental_acd_manager")
    with told, tf.Graph().as_default(), AutomaticControlDependencies():
        time_after([tf.constant(1.0)])
