"""The private code of Keras and TensorFlow that the pipeline uses.

- `uninitialized_variables`, `Variable._initializer` and `_deferred_initialize`: weights that are
  initialized later.
- `func_graph_from_py_func` and TensorFlow's statistics of operations: a layer's graph and its
  FLOPs.
- `Graph._functions` and `AtomicFunction`: the functions that operations of a graph call, such as the
  branches of a condition, and their lifetime (`tests/backend/graph/test_split.py`).
- The attribute `_noinline`, which TensorFlow's graph optimizer respects.

`tests/backend/keras/test_functional.py` fails if one of them changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import keras
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.atomic_function import AtomicFunction
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.profiler.internal import flops_registry  # noqa: F401  Registers FLOPs.

from tfdist.backend.keras.attributes import Attribute, stored_value
from tfdist.backend.keras.private import global_state


@contextlib.contextmanager
def deferred_weights() -> Iterator[None]:
    """Builds models inside without values of their weights; only the shapes are known.

    A `PipelineModel` of such a model initializes the weights of this rank's stages, with the same values
    as in the whole model; no memory is allocated for the others.

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
        # Keras would initialize them at the end of its next scope.
        global_state.set_global_attribute("uninitialized_variables", before)


def is_deferred(variable: keras.Variable) -> bool:
    """Whether a variable was built inside `deferred_weights` and has no value yet."""
    return stored_value(variable) is None


#: The initializer of a deferred variable, a function of a shape and a dtype; and its setter.
deferred_initializer = Attribute("_initializer", keras.Variable)
defer = deferred_initializer.set


def initialize_weights(variables: Sequence[keras.Variable]) -> None:
    """Initializes the deferred ones of some variables."""
    for variable in variables:
        if is_deferred(variable):
            variable._deferred_initialize()


def trace_graph(function: Callable, specs: Sequence[tf.TensorSpec]) -> func_graph.FuncGraph:
    """The graph of a function, with automatic control dependencies."""
    return func_graph.func_graph_from_py_func(
        "stage", function, args=tuple(specs), kwargs={}, add_control_dependencies=True
    )


def functions_of(graph: tf.Graph) -> list:
    """The functions that operations of a graph call.

    TensorFlow deletes a function when no Python object refers to it, even if operations call it by its
    name. These are references to the functions, but not to the graph or the graphs of the functions.
    """
    return [
        AtomicFunction(function.name, function._bound_context, function.function_type)
        if isinstance(function, AtomicFunction)
        else function
        for function in graph._functions.values()
    ]


def add_functions(graph: tf.Graph, functions: list) -> None:
    """Adds functions of another graph to a graph, which keeps them alive from now on."""
    for function in functions:
        graph._add_function_recursive(function)


def not_inlined(function: Callable) -> tf.types.experimental.GenericFunction:
    """A `tf.function` that is never inlined: its operations exist once for all of its calls."""
    return tf.function(
        function,
        autograph=False,
        reduce_retracing=False,
        experimental_attributes={"_noinline": True},
    )


def count_flops(graph: tf.Graph) -> int:
    """The floating-point operations of a graph, without those in the functions that it calls.

    A multiplication and an addition count as two. Operations without statistics in TensorFlow, or with an
    unknown shape, count as none.
    """
    total = 0
    for operation in graph.get_operations():
        with contextlib.suppress(ValueError):
            total += int(ops.get_stats_for_node_def(graph, operation.node_def, "flops").value or 0)
    return total
