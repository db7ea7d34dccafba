"""Parts of a graph as functions: what they give, and how long what they call lives."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import tensorflow as tf

from tfdist.backend.graph.split import split_graph
from tfdist.backend.keras.functional import trace_graph


def branches(x):
    """A sum, or one where there are no rows; and its gradient: two conditions."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.cond(tf.shape(x)[0] == 0, lambda: 1.0, lambda: tf.reduce_sum(x * x))
    return y, tape.gradient(y, x)


def test_what_a_part_calls_lives_as_long_as_the_part():
    graph = trace_graph(branches, [tf.TensorSpec([None, 2])])
    names = [tensor.name for tensor in graph.outputs]
    (source,) = (tensor.name for tensor in graph.inputs)
    group = set(graph.get_operations()) - {tensor.op for tensor in graph.inputs}
    assert sum(operation.type in ("If", "StatelessIf") for operation in group) == 2
    (part,) = split_graph(graph, [group], [graph.outputs])
    gone = weakref.ref(graph)
    del graph, group
    gc.collect()
    assert gone() is None
    x = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    whole = tf.function(lambda x: [part({source: x})[name] for name in names])
    for each in (x, x[:0]):
        y, gradient = whole(each)
        # Once more on the way: a function that nothing refers to is gone at the next collection.
        gc.collect()
        np.testing.assert_allclose(y, tf.reduce_sum(each * each) if len(each) else 1.0)
        np.testing.assert_allclose(gradient, 2 * each)
