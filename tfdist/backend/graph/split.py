"""Cuts the graph of a training step into functions that run at different times.

The forward pass, the gradient of the inputs and the gradients of the weights of a stage are traced
as one graph, so that TensorFlow's own gradients say what the backward pass needs of the forward.
Each part of the graph then becomes a function; what it takes from another part are its arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tfdist.backend.keras.functional import add_functions, functions_of, not_inlined

#: Operations that cost next to nothing: done again where their inputs are at hand, rather than
#: kept from one part to another.
_CHEAP = frozenset(
    {"Cast", "ExpandDims", "Identity", "Pack", "Reshape", "Shape", "Squeeze", "StridedSlice"}
)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a graph as a function.

    Attributes:
        inputs: The names of the tensors that it takes.
        outputs: The names of those that it returns.
        function: From the ones to the others.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    function: tf.types.experimental.GenericFunction

    def __call__(self, tensors: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Runs the part on tensors by name; returns its outputs by name."""
        if not self.outputs:
            return {}
        results = self.function(*(tensors[name] for name in self.inputs))
        return dict(zip(self.outputs, results, strict=True))


def ancestors(tensors: Iterable[tf.Tensor], within: set) -> set:
    """The operations of a set that the tensors come from, by data or by order."""
    found: set = set()
    waiting = [tensor.op for tensor in tensors if tensor.op in within]
    while waiting:
        operation = waiting.pop()
        if operation in found:
            continue
        found.add(operation)
        waiting += [t.op for t in operation.inputs if t.op in within]
        waiting += [other for other in operation.control_inputs if other in within]
    return found


def carve(graph, groups: Sequence[set], outputs: Sequence[Sequence[tf.Tensor]]) -> list[Part]:
    """Makes a function of each of some disjoint groups of operations.

    Args:
        graph: A traced `FuncGraph`.
        groups: Operations; a group takes tensors from the groups before it.
        outputs: For each group what must come out of it; what later groups need of it is added.

    Returns:
        The parts, in the order of the groups.
    """
    captured = {internal.name: external for external, internal in graph.captures}
    repeatable = _repeatable(graph, captured)
    taken = [_taken(group, repeatable) for group in groups]
    definition = graph.as_graph_def()
    nodes = {node.name: node for node in definition.node}
    called = functions_of(graph)
    parts = []
    for number, group in enumerate(groups):
        wanted = list(outputs[number]) + [
            tensor
            for later in taken[number + 1 :]
            for tensor in later.values()
            if tensor.op in group
        ]
        names = dict.fromkeys(tensor.name for tensor in wanted)
        own = group | _repeated(group, repeatable)
        part = graph_pb2.GraphDef(versions=definition.versions)
        kept = {operation.name for operation in own}
        # In the order of the graph, where each stands after what it takes.
        for operation in graph.get_operations():
            if operation in own and operation.name + ":0" not in captured:
                part.node.append(_without_outsiders(nodes[operation.name], kept))
        inputs = tuple(taken[number])
        handles = {
            name: captured[name]
            for name in sorted(
                {t.name for operation in own for t in operation.inputs if t.name in captured}
            )
        }
        function = _function(part, called, inputs, tuple(names), handles)
        parts.append(Part(inputs, tuple(names), function))
    return parts


def _function(
    definition, called: list, inputs: tuple[str, ...], outputs: tuple[str, ...], handles: dict
):
    # Called for each micro-batch: inlined, the graph of a step, and what TensorFlow makes of it,
    # would hold the operations of a stage as many times.
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
    """Operations that give the same whenever they run, and cost next to nothing."""
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
        if operation.type == "Const" or operation.name + ":0" in captured:
            found.add(operation)
        elif operation.type == "ReadVariableOp":
            if readers.get(operation.inputs[0].name, False):
                found.add(operation)
        elif operation.type in _CHEAP and all(t.op in found for t in operation.inputs):
            found.add(operation)
    return found


def _repeated(group: set, repeatable: set) -> set:
    """What the group takes from repeatable operations, and they from others."""
    found: set = set()
    waiting = [t.op for operation in group for t in operation.inputs if t.op in repeatable]
    while waiting:
        operation = waiting.pop()
        if operation in found:
            continue
        found.add(operation)
        waiting += [t.op for t in operation.inputs]
    return found


def _taken(group: set, repeatable: set) -> dict[str, tf.Tensor]:
    """The tensors that a group takes from outside, by name, in a fixed order."""
    found = {
        tensor.name: tensor
        for operation in group
        for tensor in operation.inputs
        if tensor.op not in group and tensor.op not in repeatable
    }
    return dict(sorted(found.items()))


def _without_outsiders(node, kept: set[str]):
    """A copy of a node that waits for nobody outside, and is placed beside nobody."""
    copy = type(node)()
    copy.CopyFrom(node)
    del copy.input[:]
    copy.input.extend(name for name in node.input if not name.startswith("^") or name[1:] in kept)
    copy.attr.pop("_class", None)
    return copy
