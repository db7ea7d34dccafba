"""An optimizer's update as a graph that a server runs on its own variables.

`optimizer.apply` is traced once against the worker's variables, which only provide their shapes, and
the trace is imported into the server's graph with the handles of the server's variables. So clipping,
weight decay, moments, accumulation, constraints, and schedules by the server's update count are those
of Keras, for any optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class TracedUpdate:
    """A trace of `optimizer.apply` for some variables.

    Attributes:
        concrete: The trace; its arguments are the gradients' tensors, flat.
        variables: The optimizer's variables that it reads or writes, by their place in
            `optimizer.variables`.
    """

    concrete: tf.types.experimental.ConcreteFunction
    variables: tuple[int, ...]


def trace_update(
    optimizer: keras.optimizers.Optimizer,
    apply: Callable,
    parameters: Sequence[keras.Variable],
    sparse: Sequence[bool],
) -> TracedUpdate:
    """Traces an update.

    Args:
        optimizer: The optimizer, built.
        apply: Its `apply`.
        parameters: The variables that are updated.
        sparse: Whether the gradient of each is sparse, as that of an embedding is.
    """
    specs = []
    for parameter, is_sparse in zip(parameters, sparse, strict=True):
        shape = tuple(parameter.shape)
        if is_sparse:
            specs.append(tf.TensorSpec((None, *shape[1:]), parameter.dtype))
            specs.append(tf.TensorSpec((None,), tf.int64))
        else:
            specs.append(tf.TensorSpec(shape, parameter.dtype))

    def update(*flat):
        left = list(flat)
        grads = []
        for parameter, is_sparse in zip(parameters, sparse, strict=True):
            value = left.pop(0)
            if is_sparse:
                shape = tf.constant(tuple(parameter.shape), tf.int64)
                value = tf.IndexedSlices(value, left.pop(0), dense_shape=shape)
            grads.append(value)
        apply(grads, list(parameters))

    with tf.init_scope():
        concrete = tf.function(update, autograph=False).get_concrete_function(*specs)
    captured = {id(outer) for outer, _ in concrete.graph.captures}
    used = tuple(
        place
        for place, variable in enumerate(optimizer.variables)
        if id(variable.value.handle) in captured
    )
    return TracedUpdate(concrete, used)


def import_update(
    traced: TracedUpdate,
    grads: Sequence[tf.Tensor],
    handles: dict[int, tf.Tensor],
    device: str,
) -> list[tf.Operation]:
    """Imports a trace into the graph under construction.

    Args:
        traced: The trace.
        grads: The tensors to use as its arguments.
        handles: The handles to use for the captured variables, by the `id` of the captured handles.
        device: The device of its operations.

    Returns:
        The operations that end the update.

    Raises:
        NotImplementedError: The optimizer uses a resource that is not one of its variables.
    """
    graph = traced.concrete.graph
    definition = graph.as_graph_def()
    for node in definition.node:
        node.device = device
    for function in definition.library.function:
        for node in function.node_def:
            node.device = ""  # The device of the operation that calls it.
    captures = graph.captures
    inner = {id(placeholder) for _, placeholder in captures}
    arguments = [tensor for tensor in graph.inputs if id(tensor) not in inner]
    inputs = {tensor.name: given for tensor, given in zip(arguments, grads, strict=True)}
    for outer, placeholder in captures:
        if id(outer) in handles:
            inputs[placeholder.name] = handles[id(outer)]
        elif outer.dtype == tf.resource:
            raise NotImplementedError(
                "A parameter server can only update variables of the model and of the optimizer. Received: "
                "an optimizer that uses another resource. Keep its state in variables made by "
                "`add_variable`."
            )
        else:
            inputs[placeholder.name] = tf.constant(outer.numpy())
    ends = [operation.name for operation in graph.control_outputs]
    return tf.graph_util.import_graph_def(
        definition, input_map=inputs, return_elements=ends, name="update"
    )
