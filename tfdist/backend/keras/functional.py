"""What the pipeline needs of Keras' and TensorFlow's private code, in one place.

- `uninitialized_variables`, `Variable._initializer` and `_deferred_initialize`: weights whose
  values come later.
- `func_graph_from_py_func` and TensorFlow's statistics of operations: a layer's graph and its
  FLOPs.
- `Graph._functions` and `AtomicFunction`: what operations of a graph call, as the branches of a
  condition, and how long that lives (`tests/backend/graph/test_split.py`).
- The attribute `_noinline`, which TensorFlow's optimizer of graphs heeds.

`tests/backend/keras/test_functional.py` fails where one of them moves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.profiler.internal import flops_registry  # noqa: F401  Registers FLOPs.

from tfdist.backend.keras.private import global_state


@contextlib.contextmanager
def deferred_weights() -> Iterator[None]:
    """Models built inside know the shapes of their weights, and have no values for them.

    A `PipelineModel` made of such a model gives values to the weights of this rank's stages, those
    that the whole model would have drawn; the others never take memory.

    ```python
    with strategy.scope():
        with tfdist.pipeline.deferred_weights():
            model = tfdist.models.gpt(50_257, num_layers=96, width=12_288, num_heads=96)
        model = tfdist.pipeline.PipelineModel(model, num_microbatches=32)
    ```
    """
    waiting = global_state.get_global_attribute("uninitialized_variables", [], set_to_default=True)
    before = list(waiting)
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        # Keras would give them values when the next scope of its own ends.
        global_state.set_global_attribute("uninitialized_variables", before)


def without_values(variable: keras.Variable) -> bool:
    """Whether a variable was built inside `deferred_weights` and has no value yet."""
    return variable._value is None


def deferred_initializer(variable: keras.Variable) -> Any:
    """What a variable without a value will be initialized with, given a shape and a dtype."""
    return variable._initializer


def defer(variable: keras.Variable, initializer: Callable) -> None:
    """Has a variable without a value be initialized by another initializer."""
    variable._initializer = initializer


def initialize_weights(variables: Sequence[keras.Variable]) -> None:
    """Gives values to those variables that have none, as their initializers say."""
    for variable in variables:
        if without_values(variable):
            variable._deferred_initialize()


def trace_graph(function: Callable, specs: Sequence[tf.TensorSpec]) -> func_graph.FuncGraph:
    """The graph of a function, with TensorFlow's order of side effects."""
    return func_graph.func_graph_from_py_func(
        "stage",
        function,
        args=tuple(specs),
        kwargs={},
        add_control_dependencies=True,
    )


def functions_of(graph: tf.Graph) -> list:
    """What operations of a graph call.

    TensorFlow forgets a function when nothing in Python refers to it, whoever calls it by its name.
    These are references that hold the functions, but neither the graph nor those of the functions.
    """
    return [
        AtomicFunction(function.name, function._bound_context, function.function_type)
        if isinstance(function, AtomicFunction)
        else function
        for function in graph._functions.values()
    ]


def called_graphs(operation: tf.Operation) -> dict[str, tf.Graph]:
    """The graphs of the functions that an operation calls, by the attributes that name them."""
    found = {}
    for name, value in operation.node_def.attr.items():
        called = [value.func] if value.HasField("func") else list(value.list.func)
        for place, each in enumerate(called):
            function = operation.graph._functions.get(each.name)
            inner = getattr(function, "graph", None)
            if inner is not None:
                found[f"{name}/{place}"] = inner
    return found


def add_functions(graph: tf.Graph, functions: list) -> None:
    """Lets operations of a graph call functions of another one, which live as long as it from now on."""
    for function in functions:
        graph._add_function_recursive(function)


def not_inlined(function: Callable) -> tf.types.experimental.GenericFunction:
    """A `tf.function` that stays one, with one copy of its operations, however often it is called."""
    return tf.function(
        function,
        autograph=False,
        reduce_retracing=False,
        experimental_attributes={"_noinline": True},
    )


def count_flops(graph: tf.Graph) -> int:
    """The floating-point operations of a graph, those in functions that it calls left out.

    A multiplication and an addition count as two. Operations that TensorFlow has no statistics
    of, or whose shape is unknown, count as none.
    """
    total = 0
    for operation in graph.get_operations():
        try:
            total += int(ops.get_stats_for_node_def(graph, operation.node_def, "flops").value or 0)
        except ValueError:
            continue
    return total
