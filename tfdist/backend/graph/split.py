"""Splits the graph of a training step into functions that run at different times.

The forward pass, the gradient of the inputs and the gradients of the weights of a stage are traced
as one graph, so that TensorFlow's own gradients determine which tensors of the forward pass the backward
pass needs. Each subgraph then becomes a function, whose arguments are its inputs from other subgraphs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tfdist.backend.keras.functional import add_functions, functions_of, not_inlined

#: Operations with negligible cost: if their inputs are available, they are repeated instead of passing
#: their outputs from one part of a graph to another.
CHEAP = frozenset(
    {"Cast", "ExpandDims", "Identity", "Pack", "Reshape", "Shape", "Squeeze", "StridedSlice"}
)


@dataclasses.dataclass(frozen=True)
class Subgraph:
    """A part of a graph as a function.

    Attributes:
        inputs: The names of its input tensors.
        outputs: The names of its output tensors.
        function: Maps the inputs to the outputs.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    function: tf.types.experimental.GenericFunction

    def __call__(self, tensors: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Runs the subgraph on tensors by name; returns its outputs by name."""
        if not self.outputs:
            return {}
        results = self.function(*(tensors[name] for name in self.inputs))
        return dict(zip(self.outputs, results, strict=True))


def ancestors(tensors: Iterable[tf.Tensor], within: set, *, ordered: bool = True) -> set:
    """The operations of a set on which tensors depend by data, and by order if that is wanted."""
    found: set = set()
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        operation = waiting.pop()
        if operation in within and operation not in found:
            found.add(operation)
            waiting += [tensor.op for tensor in operation.inputs]
            waiting += operation.control_inputs if ordered else []
    return found


def split_graph(
    graph, groups: Sequence[set], outputs: Sequence[Sequence[tf.Tensor]]
) -> list[Subgraph]:
    """Creates a function of each of some disjoint groups of operations.

    Args:
        graph: A traced `FuncGraph`.
        groups: Operations; the inputs of a group are outputs of earlier groups.
        outputs: The required outputs of each group; the inputs of later groups are added.

    Returns:
        The subgraphs, in the order of the groups.
    """
    captured = {internal.name: external for external, internal in graph.captures}
    repeatable = _repeatable(graph, captured)
    taken = [_taken(group, repeatable) for group in groups]
    definition = graph.as_graph_def()
    nodes = {node.name: node for node in definition.node}
    called = functions_of(graph)
    subgraphs = []
    for number, group in enumerate(groups):
        needed = [tensor for later in taken[number + 1 :] for tensor in later.values()]
        wanted = [*outputs[number], *(tensor for tensor in needed if tensor.op in group)]
        names = tuple(dict.fromkeys(tensor.name for tensor in wanted))
        taken_again = [tensor for operation in group for tensor in operation.inputs]
        own = group | ancestors(taken_again, repeatable, ordered=False)
        part = graph_pb2.GraphDef(versions=definition.versions)
        kept = {operation.name for operation in own}
        # In the order of the graph, which is topological.
        for operation in graph.get_operations():
            if operation in own and operation.name + ":0" not in captured:
                part.node.append(_without_outsiders(nodes[operation.name], kept))
        inputs = tuple(taken[number])
        used = sorted({tensor.name for operation in own for tensor in operation.inputs})
        handles = {name: captured[name] for name in used if name in captured}
        function = _function(part, called, inputs, names, handles)
        subgraphs.append(Subgraph(inputs, names, function))
    return subgraphs


def _function(
    definition, called: list, inputs: tuple[str, ...], outputs: tuple[str, ...], handles: dict
):
    # Called for each micro-batch: if it was inlined, the graph of a step would contain the operations of
    # a stage once per micro-batch.
    @not_inlined
    def stage_part(*tensors):
        graph = tf.compat.v1.get_default_graph()
        add_functions(graph, called)
        given = dict(zip(inputs, tensors, strict=True))
        given |= {name: graph.capture(handle) for name, handle in handles.items()}
        return tf.graph_util.import_graph_def(
            definition, input_map=given, return_elements=list(outputs), name="stage"
        )

    return stage_part


def _repeatable(graph, captured: dict) -> set:
    """Operations whose outputs do not depend on when they run, and with negligible cost."""
    readers: dict[str, bool] = {}
    for operation in graph.get_operations():
        for tensor in operation.inputs:
            if tensor.dtype == tf.resource and tensor.name in captured:
                only_reads = operation.type in ("ReadVariableOp", "ResourceGather")
                readers[tensor.name] = readers.get(tensor.name, True) and only_reads
    found: set = set()
    for operation in graph.get_operations():
        if operation.control_inputs and operation.type != "ReadVariableOp":
            continue
        if operation.type == "ReadVariableOp":
            is_repeatable = readers.get(operation.inputs[0].name, False)
        elif operation.type in CHEAP:
            is_repeatable = all(t.op in found for t in operation.inputs)
        else:
            is_repeatable = operation.type == "Const" or operation.name + ":0" in captured
        if is_repeatable:
            found.add(operation)
    return found


def _taken(group: set, repeatable: set) -> dict[str, tf.Tensor]:
    """The inputs of a group from outside, by name, in a fixed order."""
    found = {
        tensor.name: tensor
        for operation in group
        for tensor in operation.inputs
        if tensor.op not in group and tensor.op not in repeatable
    }
    return dict(sorted(found.items()))


def _without_outsiders(node, kept: set[str]):
    """A copy of a node without control inputs from outside and without colocation."""
    copy = type(node)()
    copy.CopyFrom(node)
    del copy.input[:]
    copy.input.extend(name for name in node.input if not name.startswith("^") or name[1:] in kept)
    copy.attr.pop("_class", None)
    return copy
