"""The operations of a traced step that XLA cannot compile, and why."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

from tfdist.backend import devices
from tfdist.backend.graph.compiling import is_excluded
from tfdist.backend.xla.registry import compiled_operations
from tfdist.backend.xla.sizes import Inputs, Sizes, inputs_by_name

#: Operations that stay outside of compiled parts, and that are no obstacle for the rest of a layer.
_OUTSIDE = frozenset({"Assert", "NoOp", "Placeholder", "PlaceholderWithDefault", "PrintV2"})
#: In a compiled part nothing changes the memory of a variable that a result shares.
COPIES = frozenset({"DeepCopy"})
#: Some operations of collectives are created outside of `excluded`.
_COLLECTIVES = ("Collective", "Horovod", "Tfdist")
#: They are compiled in functions.
_IGNORED = frozenset({"NoOp"})
#: Operations that call one of their functions, and pass it their inputs except for the first.
BRANCHES = frozenset({"Case", "If", "StatelessCase", "StatelessIf"})
#: Operations that call one of their functions until the other one returns false.
LOOPS = frozenset({"StatelessWhile", "While"})


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """An operation that XLA cannot compile.

    Attributes:
        operation: Its type.
        name: Its name in the graph of the step, which begins with those of the layers.
        reason: What XLA lacks, as the end of a sentence; empty if the operation is to run outside.
    """

    operation: str
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.operation} ({self.name}): {self.reason}"


def has_list(op: tf.Operation) -> bool:
    """Whether an operation takes or returns a list of tensors."""
    return any(tensor.dtype == tf.variant for tensor in [*op.inputs, *op.outputs])


def called(op: tf.Operation) -> dict[str, list[str]]:
    """The names of the functions that an operation calls, by attribute."""
    found = {}
    for name, value in op.node_def.attr.items():
        if value.HasField("func"):
            found[name] = [value.func.name]
        elif value.list.func:
            found[name] = [each.name for each in value.list.func]
    return found


class Functions:
    """The functions that a graph calls, as graphs.

    Args:
        definitions: The definitions, by name.
    """

    def __init__(self, definitions: Callable[[str], Any]):
        self._definitions = definitions
        self._graphs: dict[str, tf.Graph] = {}
        self._obstacles: dict[tuple, Obstacle | None] = {}

    def graph(self, name: str):
        """The graph of a function."""
        if name not in self._graphs:
            # Functions that it calls are looked up in the default graph, which need not have them, or else here.
            with tf.init_scope():
                self._graphs[name] = function_def_to_graph(self._definitions(name))
        return self._graphs[name]

    def never_inlined(self, name: str) -> bool:
        """Whether a function is not to be inlined, since it is called many times."""
        return self._definitions(name).attr["_noinline"].b

    def obstacle(self, name: str, inputs: Inputs) -> Obstacle | None:
        """The first operation in a function that XLA cannot compile; None if there is none.

        Args:
            name: The function.
            inputs: What is known of its arguments.
        """
        key = name, inputs
        if key not in self._obstacles:
            graph = self.graph(name)
            operations = sorted_operations(graph)
            sizes = Sizes(operations, graph.inputs, inputs)
            found = obstacles(operations, sizes, self, {each.op.name for each in graph.inputs})
            kept = (each for op, each in found if op.type not in _IGNORED)
            self._obstacles[key] = next(kept, None)
        return self._obstacles[key]


def sorted_operations(graph) -> list[tf.Operation]:
    """The operations of the graph of a function that run, each after those that it depends on."""
    found: dict[str, tf.Operation] = {}
    for root in [*(tensor.op for tensor in graph.outputs), *graph.control_outputs]:
        waiting = [(root, _before(root))]
        while waiting:
            op, before = waiting[-1]
            if op.name in found:
                waiting.pop()
                continue
            lacking = next((each for each in before if each.name not in found), None)
            if lacking is None:
                found[op.name] = op
                waiting.pop()
            else:
                waiting.append((lacking, _before(lacking)))
    return list(found.values())


def _before(op: tf.Operation) -> Iterator[tf.Operation]:
    yield from (tensor.op for tensor in op.inputs)
    yield from op.control_inputs


def obstacles(
    operations: Sequence[tf.Operation], sizes: Sizes, functions: Functions, arguments: set[str]
) -> Iterator[tuple[tf.Operation, Obstacle]]:
    """The operations that XLA cannot compile, in order.

    Args:
        operations: All operations of a graph, sorted.
        sizes: Its sizes.
        functions: Its functions.
        arguments: The names of the operations of the inputs of the graph.
    """
    names: set[str] = set()
    for op in operations:
        if op.name in arguments or op.type == "Const":
            continue
        reason = _reason(op, sizes, functions)
        if reason is None:
            continue
        if is_excluded(op):
            names.add(op.name)
        # TensorFlow does not exclude the gradient of an operation that is.
        forward = re.sub(r"_\d+$", "", op.name.removeprefix("gradient_tape/"))
        yield op, Obstacle(op.type, op.name, "" if forward in names else reason)


def _reason(op: tf.Operation, sizes: Sizes, functions: Functions) -> str | None:
    """Why XLA cannot compile an operation; an empty text if it is to run outside; None if XLA can."""
    if op.type in _OUTSIDE or op.type.startswith(_COLLECTIVES) or is_excluded(op):
        return ""
    if _is_on_host(op, sizes):
        return ""
    if op.type not in compiled_operations() and op.type not in COPIES:
        return "XLA has no kernel for this operation"
    if any(tensor.dtype == tf.string for tensor in [*op.inputs, *op.outputs]):
        return "XLA does not support strings"
    if op.type == "EmptyTensorList":
        # Those of a `tf.while_loop` without `maximum_iterations` have no maximum length.
        longest = sizes.folded(op.inputs[1])
        if longest is None or longest < 0:
            return ""
    varying = [sizes.varies(tensor) for tensor in op.inputs]
    lacking = sizes.lacking(op)
    if lacking is not None or any(sizes.varies(tensor) for tensor in op.outputs):
        # Where a size comes from an excluded operation, that one decides.
        given = inputs_by_name(op)[lacking] if lacking else []
        if any(varying) or any(map(_is_after_excluded, given)):
            return ""
        return f"the size of its result depends on values{f' (`{lacking}`)' if lacking else ''}"
    if any(varying):
        return ""
    return _reason_in_functions(op, sizes, functions)


def _reason_in_functions(op: tf.Operation, sizes: Sizes, functions: Functions) -> str | None:
    inputs = inputs_of_functions(op, sizes, functions)
    for name in [name for each in called(op).values() for name in each]:
        inner = functions.obstacle(name, inputs)
        if inner is not None:
            return f"it contains {inner}" if inner.reason else ""
    if op.type in BRANCHES and not all(each.shape.is_fully_defined() for each in op.outputs):
        return ""  # Results of its branches may have different sizes. Each branch is compiled.
    return None


def inputs_of_functions(op: tf.Operation, sizes: Sizes, functions: Functions) -> Inputs:
    """What is known of the arguments of the functions that an operation calls."""
    inputs = sizes.inputs_of(list(op.inputs)[1:] if op.type in BRANCHES else list(op.inputs))
    if op.type not in LOOPS:
        return inputs
    body = functions.graph(op.get_attr("body").name)
    kept = [not _is_changed(*pair) for pair in zip(body.inputs, body.outputs, strict=True)]
    known = tuple(each and same for each, same in zip(inputs.known, kept, strict=True))
    return dataclasses.replace(inputs, known=known)


def _is_changed(given: tf.Tensor, result: tf.Tensor) -> bool:
    while result.op.type == "Identity":
        result = result.op.inputs[0]
    return result.name != given.name


def _is_after_excluded(tensor: tf.Tensor) -> bool:
    """Whether a tensor depends on an operation that is excluded."""
    known, waiting = set(), [tensor.op]
    while waiting:
        op = waiting.pop()
        if op.name in known:
            continue
        known.add(op.name)
        if is_excluded(op):
            return True
        waiting += [each.op for each in op.inputs]
    return False


def _is_on_host(op: tf.Operation, sizes: Sizes) -> bool:
    """Whether an operation of a rank with a GPU runs on the CPU, or has a variable in its memory."""
    if not devices.has_gpu():
        return False
    if any(tensor.name in sizes.on_host for tensor in op.inputs):
        return True
    return "CPU:" in op.device and not all(map(sizes.is_known, op.outputs))
