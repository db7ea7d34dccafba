"""Where the tensors of a traced step would be on a machine with a GPU, and where its host would wait for the GPU.

The placement is read from TensorFlow's registry of GPU kernels, which also lists the inputs and outputs that such a
kernel has in the memory of the host. An operation without a kernel for the GPU runs on the host.
"""

from __future__ import annotations

import collections
import dataclasses
import functools

import tensorflow as tf
from tensorflow.python.framework import kernels

#: Operations that call a function of the graph in place.
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_BRANCHES = ("If", "StatelessIf")
_LOOPS = ("While", "StatelessWhile")
#: Handles are the host's; a list of tensors holds them where they are.
_HANDLES = (tf.resource, tf.variant)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an operation runs, and which of its tensors are in the memory of the host."""

    on_host: bool
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]


@dataclasses.dataclass
class Node:
    """An operation, of the step or of a function in it."""

    name: str
    kind: str
    on_host: bool
    #: The nodes that use its outputs, or wait for it.
    users: list[Node] = dataclasses.field(default_factory=list)
    #: Whether the host decides something with its result: a branch, a loop, a size.
    decides: bool = False

    __hash__ = object.__hash__


@dataclasses.dataclass(frozen=True)
class Wait:
    """A tensor, or only an end, that goes from the GPU to the host."""

    source: Node
    target: Node
    is_control: bool

    def __str__(self) -> str:
        how = "wait" if self.is_control else "copy"
        return (
            f"{how}: {self.source.kind} {self.source.name} -> {self.target.kind} {self.target.name}"
        )


@functools.cache
def _registered(kind: str) -> list:
    """The kernels for a GPU, then those for any device."""
    found = kernels.get_registered_kernels_for_op(kind).kernel
    return [each for device in ("GPU", "DEFAULT") for each in found if each.device_type == device]


def _attributes(op: tf.Operation) -> dict:
    return {
        each.name: op.get_attr(each.name)
        for each in op.op_def.attr
        if each.name in op.node_def.attr
    }


def _fits(kernel, attributes: dict) -> bool:
    for constraint in kernel.constraint:
        allowed = constraint.allowed_values.list.type
        found = attributes.get(constraint.name)
        found = found if isinstance(found, list) else [found]
        if any(
            tf.as_dtype(each).as_datatype_enum not in allowed for each in found if each is not None
        ):
            return False
    return True


def _spread(arguments, attributes: dict, names: set[str]) -> tuple[bool, ...]:
    """For each tensor of some arguments whether the argument is one of the names."""
    found: list[bool] = []
    for argument in arguments:
        count = 1
        if argument.number_attr:
            count = attributes[argument.number_attr]
        elif argument.type_list_attr:
            count = len(attributes[argument.type_list_attr])
        found += [argument.name in names] * count
    return tuple(found)


def place_of(op: tf.Operation) -> Place:
    """Where an operation would run, and where its tensors would be."""
    everything = Place(True, (True,) * len(op.inputs), (True,) * len(op.outputs))
    if "CPU:0" in op.device:
        return everything
    attributes = _attributes(op)
    kernel = next((each for each in _registered(op.type) if _fits(each, attributes)), None)
    if kernel is None:
        return everything
    on_host = set(kernel.host_memory_arg)
    inputs = _spread(op.op_def.input_arg, attributes, on_host)
    outputs = _spread(op.op_def.output_arg, attributes, on_host)
    return Place(
        False,
        tuple(h or t.dtype in _HANDLES for h, t in zip(inputs, op.inputs, strict=True)),
        tuple(h or t.dtype in _HANDLES for h, t in zip(outputs, op.outputs, strict=True)),
    )


@functools.cache
def _is_carried_on_host(dtype: tf.DType) -> bool:
    """Whether branches and loops hand a dtype on in the memory of the host."""
    for kernel in _registered("Switch"):
        if _fits(kernel, {"T": dtype}):
            return "data" in kernel.host_memory_arg
    return True


class Step:
    """A traced step, with all of its functions in one graph of nodes.

    Attributes:
        nodes: All operations.
        waits: Where something goes from the GPU to the host.
    """

    def __init__(self, graph: tf.Graph):
        self.nodes: list[Node] = []
        self.waits: list[Wait] = []
        captured = {inner.name: outer for outer, inner in graph.captures}
        outside = []
        for each in graph.inputs:
            # A batch comes from the memory of the host; of a handle this says where its variable is.
            outer = captured.get(each.name)
            is_on_host = outer is None or "CPU:0" in outer.device
            outside.append((Node(each.name, "Argument", is_on_host), is_on_host))
        self._walk(graph, outside, "")

    def gating(self) -> list[Wait]:
        """The waits whose end the GPU, or a decision of the host, waits for."""
        return [wait for wait in self.waits if self._gates(wait.target)]

    def _gates(self, node: Node) -> bool:
        seen, waiting = {node}, collections.deque([node])
        while waiting:
            each = waiting.popleft()
            if each.decides or not each.on_host:
                return True
            for user in each.users:
                if user not in seen:
                    seen.add(user)
                    waiting.append(user)
        return False

    def _walk(self, graph, arguments: list, prefix: str) -> list:
        """Adds a graph; returns for each of its outputs the node that makes it, and whether it is on the host."""
        made: dict[str, tuple[Node, bool]] = {}
        ends: dict[str, Node] = {}
        for tensor, argument in zip(graph.inputs, arguments, strict=True):
            made[tensor.name] = argument
            ends[tensor.op.name] = argument[0]
        for op in _in_order(graph):
            if op.name in ends:
                continue
            if op.type == "Const":
                # Constants are made where they are used.
                node = Node(prefix + op.name, op.type, False)
                made[op.outputs[0].name] = node, True
                ends[op.name] = node
                continue
            given = [made[tensor.name] for tensor in op.inputs]
            if given and not op.control_inputs and all(node.kind == "Const" for node, _ in given):
                # TensorFlow computes it while it optimizes the graph.
                ends[op.name] = node = Node(prefix + op.name, "Const", True)
                made |= {tensor.name: (node, True) for tensor in op.outputs}
                continue
            before = [ends[each.name] for each in op.control_inputs]
            if op.type in _CALLS:
                results = self._call(op, function_of(graph, op, "f"), given, prefix)
            elif op.type in _BRANCHES:
                results = self._branch(graph, op, given, prefix)
            elif op.type in _LOOPS:
                results = self._loop(graph, op, given, prefix)
            else:
                results = self._operation(op, given, before, prefix)
            for tensor, result in zip(op.outputs, results, strict=True):
                made[tensor.name] = result
            ends[op.name] = results[0][0] if results else self.nodes[-1]
        return [made[tensor.name] for tensor in graph.outputs]

    def _operation(self, op, given: list, before: list[Node], prefix: str) -> list:
        place = place_of(op)
        handles = [
            there for (_, there), t in zip(given, op.inputs, strict=True) if t.dtype == tf.resource
        ]
        if any(handles):
            # TensorFlow places what reads or writes a variable with it.
            place = Place(True, (True,) * len(op.inputs), (True,) * len(op.outputs))
        node = Node(prefix + op.name, op.type, place.on_host)
        self.nodes.append(node)
        for (source, on_host), wants_host, tensor in zip(
            given, place.inputs, op.inputs, strict=True
        ):
            source.users.append(node)
            if tensor.dtype not in _HANDLES and self._goes_down(source, on_host, wants_host):
                # What a kernel of the GPU reads on the host has to be there before it starts.
                target = node if place.on_host else self._decision(node)
                self.waits.append(Wait(source, target, False))
        for source in before:
            source.users.append(node)
            if place.on_host and not source.on_host and source.kind not in ("Const", "Argument"):
                self.waits.append(Wait(source, node, True))
        return [(node, on_host) for on_host in place.outputs]

    @staticmethod
    def _goes_down(source: Node, is_on_host: bool, wants_host: bool) -> bool:
        """Whether a tensor goes from the GPU to the host; a constant is made where it is used."""
        return wants_host and not is_on_host and source.kind != "Const"

    def _decision(self, node: Node) -> Node:
        found = Node(node.name, f"{node.kind} (host)", True, decides=True)
        self.nodes.append(found)
        return found

    def _call(self, op, body, given: list, prefix: str) -> list:
        return self._walk(body, given, f"{prefix}{op.name}/")

    def _branch(self, graph, op, given: list, prefix: str) -> list:
        predicate, is_on_host = given.pop(0)
        node = Node(prefix + op.name, op.type, True, decides=True)
        self.nodes.append(node)
        predicate.users.append(node)
        if not is_on_host:
            self.waits.append(Wait(predicate, node, False))
        given = [
            self._handed(node, op, each, t) for each, t in zip(given, op.inputs[1:], strict=True)
        ]
        found = [
            self._walk(function_of(graph, op, name), given, f"{prefix}{op.name}/{name}/")
            for name in ("then_branch", "else_branch")
        ]
        results = []
        for tensor, *each in zip(op.outputs, *found, strict=True):
            on_host = "CPU:0" in op.device or _is_carried_on_host(tensor.dtype)
            made = Node(f"{prefix}{op.name}:{tensor.name}", "Merge", on_host)
            self.nodes.append(made)
            for source, is_there in each:
                source.users.append(made)
                if self._goes_down(source, is_there, on_host):
                    self.waits.append(Wait(source, made, False))
            results.append((made, on_host))
        return results or [(node, True)]

    def _loop(self, graph, op, given: list, prefix: str) -> list:
        node = Node(prefix + op.name, op.type, True, decides=True)
        self.nodes.append(node)
        carried = [
            self._handed(node, op, each, t) for each, t in zip(given, op.inputs, strict=True)
        ]
        ((predicate, is_on_host),) = self._walk(
            function_of(graph, op, "cond"), carried, f"{prefix}{op.name}/cond/"
        )
        predicate.users.append(node)
        if not is_on_host:
            self.waits.append(Wait(predicate, node, False))
        results = self._walk(function_of(graph, op, "body"), carried, f"{prefix}{op.name}/body/")
        for (target, on_host), (source, is_there) in zip(carried, results, strict=True):
            source.users.append(target)
            if self._goes_down(source, is_there, on_host):
                self.waits.append(Wait(source, target, False))
        return carried

    def _handed(self, node: Node, op, given: tuple[Node, bool], tensor) -> tuple[Node, bool]:
        """A tensor that goes into a branch or a loop."""
        source, is_there = given
        if tensor.dtype in _HANDLES:
            return given
        on_host = "CPU:0" in op.device or _is_carried_on_host(tensor.dtype)
        found = Node(f"{node.name}:{tensor.name}", "Switch", on_host)
        self.nodes.append(found)
        source.users.append(found)
        if self._goes_down(source, is_there, on_host):
            self.waits.append(Wait(source, found, False))
        return found, on_host


def _in_order(graph) -> list[tf.Operation]:
    """All operations, each after those that it uses or waits for."""
    waiting: collections.Counter[tf.Operation] = collections.Counter()
    users = collections.defaultdict(list)
    operations = graph.get_operations()
    for op in operations:
        before = {tensor.op for tensor in op.inputs} | set(op.control_inputs)
        waiting[op] = len(before)
        for each in before:
            users[each].append(op)
    ready = collections.deque(op for op in operations if not waiting[op])
    found = []
    while ready:
        found.append(ready.popleft())
        for user in users[found[-1]]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    if len(found) < len(operations):
        raise ValueError(
            f"A circle of operations: {[op.name for op in operations if waiting[op]][:5]}"
        )
    return found


def function_of(graph, op: tf.Operation, attribute: str):
    """The graph of a function that an operation calls."""
    name = op.get_attr(attribute)
    name = getattr(name, "name", name)
    while graph is not None:
        found = graph._functions.get(name) or graph._functions.get(name.encode())
        if found is not None:
            return found.graph
        graph = getattr(graph, "outer_graph", None)
    raise KeyError(name)
