"""The private code of Keras and TensorFlow that pipelines rely on is where it was."""

from __future__ import annotations

import inspect

import keras
import pytest
import tensorflow as tf
from keras.src.backend.common import global_state, variables
from tensorflow.python.eager import context
from tensorflow.python.framework import func_graph, ops

from tfdist.backend.keras.functional import deferred_weights, not_inlined, trace_graph


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (keras.Variable, "_deferred_initialize", ["self"]),
        (keras.Variable, "_initialize", ["self", "value"]),
        (variables, "initialize_all_variables", []),
        (global_state, "get_global_attribute", ["name", "default"]),
        (global_state, "set_global_attribute", ["name", "value"]),
        (func_graph, "func_graph_from_py_func", ["name", "python_func", "args", "kwargs"]),
        (ops, "get_stats_for_node_def", ["graph", "node", "statistic_type"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_functions_take_what_they_took(owner, name, parameters):
    assert hasattr(owner, name), f"{owner.__name__}.{name} has moved: see keras_graph.py"
    found = list(inspect.signature(getattr(owner, name)).parameters)
    assert found[: len(parameters)] == parameters


def test_deferred_variables_are_off_keras_list():
    with deferred_weights():
        layer = keras.layers.Dense(3)
        layer.build((None, 2))
    assert layer.kernel._value is None
    with keras.StatelessScope():
        pass  # Keras gives values to what it has listed when this ends.
    assert layer.kernel._value is None


def test_traced_graphs_order_their_side_effects():
    variable = tf.Variable(0.0)

    def function(x):
        variable.assign_add(x)
        variable.assign_add(2 * x)

    graph = trace_graph(function, [tf.TensorSpec((), tf.float32)])
    first, second = (op for op in graph.get_operations() if op.type == "AssignAddVariableOp")
    assert first in second.control_inputs
    assert [external is variable.handle for external, _ in graph.captures] == [True]


@pytest.mark.parametrize(("wrap", "copies"), [(tf.function, 3), (not_inlined, 0)])
def test_functions_that_are_not_inlined_stay_calls(wrap, copies):
    square = wrap(lambda x: tf.matmul(x, x))
    context.enable_graph_collection()
    try:
        tf.function(lambda x: square(square(square(x))))(tf.eye(2))
        graphs = context.export_run_metadata().function_graphs
    finally:
        context.disable_graph_collection()
    found = [node.op for node in graphs[-1].post_optimization_graph.node]
    assert found.count("MatMul") == copies
    assert found.count("PartitionedCall") == 3 - copies
