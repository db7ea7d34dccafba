"""Gradients of one's own go when their graphs go."""

from __future__ import annotations

import gc
import weakref

import pytest
import tensorflow as tf
from tensorflow.python.framework import ops

from tfdist.backend.graph.custom_gradient import custom_gradient


@custom_gradient
def times_two(x):
    """Its gradient is ten times what it should be, which tells who made it."""
    return 2 * x, lambda dy: 20 * dy


def gradient_of(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = times_two(times_two(x))
    return y, tape.gradient(y, x)


def test_the_table_is_where_it_was():
    assert isinstance(ops.gradient_registry._registry, dict), "has moved: see custom_gradient.py"
    assert "type" in ops.gradient_registry._registry["IdentityN"], "see custom_gradient.py"


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_it_is_taken(wrap):
    y, dx = wrap(gradient_of)(tf.constant(3.0))
    assert (float(y), float(dx)) == (12.0, 400.0)


def test_in_a_loop_whose_gradient_comes_later():
    @tf.function
    def repeat(x):
        return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, times_two(x)), (0, x))[1]

    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = repeat(x)
    assert (float(y), float(tape.gradient(y, x))) == (8.0, 8000.0)


def traced() -> tf.Graph:
    return tf.function(gradient_of).get_concrete_function(tf.TensorSpec((), tf.float32)).graph


def test_the_graph_is_freed():
    graph = traced()
    assert any(operation.type == "IdentityN" for operation in graph.get_operations())
    before = weakref.ref(graph)
    del graph
    gc.collect()
    assert before() is None


def test_a_saved_model_has_it(tmp_path):
    module = tf.Module()
    module.call = tf.function(times_two, input_signature=[tf.TensorSpec((), tf.float32)])
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(module, str(tmp_path), options=options)
    loaded, x = tf.saved_model.load(str(tmp_path)), tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = loaded.call(x)
    assert (float(y), float(tape.gradient(y, x))) == (6.0, 20.0)


def test_a_copy_that_outlives_the_graph_says_so():
    graph = traced()
    definition = graph.as_graph_def()
    del graph
    gc.collect()
    with tf.Graph().as_default() as copy:
        tf.import_graph_def(definition, name="")
        last = [operation for operation in copy.get_operations() if operation.type == "IdentityN"][
            -1
        ]
        with pytest.raises(RuntimeError, match="its graph was freed"):
            tf.gradients(last.outputs[0], last.inputs[0])
