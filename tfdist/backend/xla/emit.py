"""Functions whose parts XLA compiles, created from the graph of a traced function."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.eager import context

from tfdist.backend import devices
from tfdist.backend.graph.compiling import AGAIN
from tfdist.backend.graph.order import in_any_order
from tfdist.backend.keras.functional import add_functions, functions_of
from tfdist.backend.xla.islands import Division, Part, divide
from tfdist.backend.xla.obstacles import (
    BRANCHES,
    COPIES,
    LOOPS,
    Functions,
    Obstacle,
    called,
    inputs_of_functions,
)
from tfdist.backend.xla.ordering import canonical_order
from tfdist.backend.xla.sizes import Inputs, Sizes

_logger = logging.getLogger("tfdist")

#: Attributes of operations that TensorFlow needs when it runs them.
_NEEDED = frozenset(
    {"_lower_using_switch_merge", "_num_original_outputs", "_read_only_resource_inputs"}
)
#: Operations whose functions are divided in turn.
_DIVIDED = BRANCHES | LOOPS | {"PartitionedCall", "StatefulPartitionedCall"}


@dataclasses.dataclass
class Summary:
    """What was compiled of a step.

    Attributes:
        compiled: The number of operations in compiled parts.
        others: The number of other operations, without constants and the like.
        islands: The number of compiled parts.
        distinct: The number of different ones: equal parts are compiled once.
        obstacles: The operations that XLA cannot compile, without those that are excluded.
    """

    compiled: int = 0
    others: int = 0
    islands: int = 0
    distinct: int = 0
    obstacles: list[Obstacle] = dataclasses.field(default_factory=list)


class Compiler:
    """Creates functions with compiled parts for one traced step.

    Args:
        graph: The graph of the step, a `FuncGraph`.
    """

    def __init__(self, graph):
        self.summary = Summary()
        self._graph = graph
        self._called = functions_of(graph)
        self._functions = Functions(context.context().get_function_def)
        self._islands: dict[object, tf.types.experimental.GenericFunction] = {}
        self._rewritten: dict[tuple, Any] = {}

    def compile(self) -> Callable[..., Sequence[tf.Tensor]]:
        """A function of the graph's inputs, including what it captures, that returns its outputs."""
        no = (False,) * len(self._graph.inputs)
        outside = {inner.name: captured for captured, inner in self._graph.captures}
        on_host = (_is_on_host(outside.get(tensor.name)) for tensor in self._graph.inputs)
        return self._function(self._graph, Inputs(no, no, tuple(on_host)))

    def _function(self, graph, inputs: Inputs, **options):
        division = divide(graph, inputs, self._functions)
        self.summary.obstacles += [each for each in division.obstacles if each.reason]

        def with_islands(*given):
            return _Emission(self, graph, division, given).run()

        return tf.function(with_islands, autograph=False, reduce_retracing=False, **options)

    def island(self, definition: _Definition, outputs: Sequence[str]):
        """The compiled function of a part; the same for equal parts."""
        graph_def, inputs = definition.graph_def, list(definition.taken.values())
        key = (
            graph_def.SerializeToString(deterministic=True),
            *(definition.variable_shapes, *inputs, *outputs),
        )
        if key not in self._islands:
            called_functions = self._called

            @tf.function(autograph=False, jit_compile=True, reduce_retracing=False)
            def island(*given):
                add_functions(tf.compat.v1.get_default_graph(), called_functions)
                return tf.graph_util.import_graph_def(
                    graph_def,
                    input_map=dict(zip(inputs, given, strict=True)),
                    return_elements=list(outputs),
                    name="",
                )

            self._islands[key] = island
            self.summary.distinct += 1
        return self._islands[key]

    def rewritten(self, op: tf.Operation, sizes: Sizes) -> dict[str, list]:
        """Functions with compiled parts in place of those that an operation calls, by attribute."""
        inputs = inputs_of_functions(op, sizes, self._functions)
        return {
            attribute: [self._rewritten_function(name, inputs) for name in names]
            for attribute, names in called(op).items()
            if not (op.type in LOOPS and attribute == "cond")
        }

    def _rewritten_function(self, name: str, inputs: Inputs):
        key = name, inputs
        if key not in self._rewritten:
            graph = self._functions.graph(name)
            options = {}
            if self._functions.never_inlined(name):
                options["experimental_attributes"] = {"_noinline": True}
            function = self._function(graph, inputs, **options)
            specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in graph.inputs]
            self._rewritten[key] = function.get_concrete_function(*specs)
        return self._rewritten[key]

    def size(self, op: tf.Operation) -> int:
        """The number of operations of an operation: those of the functions that it calls."""
        names = [name for each in called(op).values() for name in each]
        return sum(len(self._functions.graph(name).get_operations()) for name in names) or 1

    def add_functions(self, graph) -> None:
        """Adds the functions of the step to a graph."""
        add_functions(graph, self._called)


class _Emission:
    """The creation of one function's operations in the current graph.

    Args:
        compiler: The functions of the step.
        graph: The graph to emit.
        division: Its parts.
        given: A tensor for each input of the graph.
    """

    def __init__(self, compiler: Compiler, graph, division: Division, given: Sequence[tf.Tensor]):
        self._compiler, self._from, self._division = compiler, graph, division
        self._to = tf.compat.v1.get_default_graph()
        self._tensors = {
            inner.name: tensor for inner, tensor in zip(graph.inputs, given, strict=True)
        }
        self._arguments = {tensor.op.name for tensor in graph.inputs}
        self._done: dict[str, tf.Operation] = {}
        self._part_of = {
            op.name: place for place, part in enumerate(division.parts) for op in part.operations
        }
        self._used_elsewhere = self._find_used_elsewhere()

    def run(self) -> list[tf.Tensor]:
        """Emits all parts; returns the outputs of the graph."""
        self._compiler.add_functions(self._to)
        for place, part in enumerate(self._division.parts):
            if part.is_compiled:
                self._emit_compiled(place, part)
            else:
                self._emit(part)
        rest = [
            tensor.op for tensor in self._from.outputs if tensor.op.name in self._division.repeated
        ]
        if rest:
            self._emit(Part(rest, False))
        last = [self._done[op.name] for op in self._from.control_outputs if op.name in self._done]
        with tf.control_dependencies(list(dict.fromkeys(last))):
            return [tf.identity(self._tensors[tensor.name]) for tensor in self._from.outputs]

    def _find_used_elsewhere(self) -> dict[int, list[str]]:
        """By part, the names of the tensors that operations outside of it use, or that are returned."""
        found: dict[int, dict[str, None]] = {}
        for place, part in enumerate(self._division.parts):
            for op in part.operations:
                for tensor in op.inputs:
                    source = self._part_of.get(tensor.op.name, place)
                    if source != place:
                        found.setdefault(source, {})[tensor.name] = None
        for tensor in self._from.outputs:
            if tensor.op.name in self._part_of:
                found.setdefault(self._part_of[tensor.op.name], {})[tensor.name] = None
        return {place: list(names) for place, names in found.items()}

    def _emit_compiled(self, place: int, part: Part) -> None:
        operations = canonical_order(part.operations, self._division.before)
        definition = _Definition(self._division, self._arguments, operations)
        # In the order of the part itself, so that equal parts have equal outputs whatever uses them.
        used = sorted(self._used_elsewhere.get(place, []), key=definition.order)
        function = self._compiler.island(definition, [definition.renamed(name) for name in used])
        with tf.control_dependencies(self._before(part)):
            results = function(*(self._tensors[name] for name in definition.taken))
        call = self._to.get_operations()[-1]
        while call.type not in ("PartitionedCall", "StatefulPartitionedCall"):
            call = call.inputs[0].op
        for name, tensor in zip(used, results or [], strict=True):
            tensor.set_shape(self._from.get_tensor_by_name(name).shape)
            self._tensors[name] = tensor
        for op in part.operations:
            self._done[op.name] = call
        in_any_order(call)
        summary = self._compiler.summary
        summary.islands += 1
        summary.compiled += sum(map(self._compiler.size, part.operations))

    def _before(self, part: Part) -> list[tf.Operation]:
        own = {op.name for op in part.operations}
        names = {name for op in part.operations for name in self._division.before[op.name]} - own
        return list(dict.fromkeys(self._done[name] for name in sorted(names)))

    def _emit(self, part: Part) -> None:
        definition = _Definition(self._division, self._arguments, part.operations, plain=True)
        for op in part.operations:
            if op.type in _DIVIDED:
                replaced = self._compiler.rewritten(op, self._division.sizes)
                definition.replace_functions(op, replaced)
                for functions in replaced.values():
                    for function in functions:
                        function.add_to_graph(self._to)
        imported = tf.graph_util.import_graph_def(
            definition.graph_def,
            input_map={new: self._tensors[name] for name, new in definition.taken.items()},
            return_elements=[op.name for op in part.operations],
            name="between",
        )
        for op, new in zip(part.operations, imported, strict=True):
            self._done[op.name] = new
            for before, after in zip(op.outputs, new.outputs, strict=True):
                self._tensors[before.name] = after
        for op, new in zip(part.operations, imported, strict=True):
            by_data = {tensor.op.name for tensor in op.inputs}
            names = [each for each in self._division.before.get(op.name, ()) if each not in by_data]
            more = list(dict.fromkeys(self._done[name] for name in names))
            if more:
                new._add_control_inputs(more)
            if op._is_stateful:
                in_any_order(new)
        self._compiler.summary.others += len(part.operations)


def _is_on_host(captured) -> bool:
    """Whether this is a variable in the memory of the host of a rank with a GPU."""
    return devices.has_gpu() and captured is not None and "CPU:" in (captured.device or "")


class _Definition:
    """Operations of a graph as a definition, with those that they repeat.

    Args:
        division: The division of the graph.
        arguments: The names of the operations of the inputs of the graph.
        operations: The operations.
        plain: Whether they keep their names, devices and attributes, and their order is that of the caller.

    Attributes:
        graph_def: The definition.
        taken: The names of the tensors that they take from elsewhere, and the names of these here.
        variable_shapes: The shapes of the variables that they read.
    """

    def __init__(
        self,
        division: Division,
        arguments: set[str],
        operations: Sequence[tf.Operation],
        plain: bool = False,
    ):
        self._division, self._arguments, self._plain = division, arguments, plain
        self._own = {op.name for op in operations}
        self._names: dict[str, str] = {}
        self._nodes: dict[str, node_def_pb2.NodeDef] = {}
        self.taken: dict[str, str] = {}
        self.variable_shapes: tuple[str, ...] = ()
        self.graph_def = graph_pb2.GraphDef()
        self.graph_def.versions.CopyFrom(operations[0].graph.graph_def_versions)
        for op in operations:
            self._add(op)

    def renamed(self, name: str) -> str:
        """The name here of the result of an operation of the definition."""
        source, place = name.rsplit(":", 1)
        return f"{self._names[source]}:{place}"

    def order(self, name: str) -> tuple[int, int]:
        """The place of the result of an operation among those of the definition."""
        source, place = name.rsplit(":", 1)
        return int(self._names[source].removeprefix("n")), int(place)

    def replace_functions(self, op: tf.Operation, functions: dict[str, list]) -> None:
        """Replaces the functions that an operation calls."""
        node = self._nodes[op.name]
        for attribute, others in functions.items():
            value = node.attr[attribute]
            named = [value.func] if value.HasField("func") else list(value.list.func)
            for each, other in zip(named, others, strict=True):
                each.name = other.name

    def _add(self, op: tf.Operation) -> None:
        if op.name in self._names:
            return
        inputs = [self._input(tensor) for tensor in op.inputs]
        if not self._plain and AGAIN in op.node_def.attr:
            pairs = zip(op.inputs, inputs, strict=True)
            inputs = [self._behind_barrier(tensor, name) for tensor, name in pairs]
        if not self._plain:
            before = self._division.before.get(op.name, ())
            by_data = {tensor.op.name for tensor in op.inputs}
            inputs += [
                f"^{self._names[name]}"
                for name in before
                if name in self._names and name in self._own and name not in by_data
            ]
        node = self._new(op)
        node.input.extend(inputs)
        if op.type == "ReadVariableOp":
            self.variable_shapes += (str(op.outputs[0].shape),)

    def _input(self, tensor: tf.Tensor) -> str:
        op = tensor.op
        if op.name in self._names:
            return self.renamed(tensor.name)
        if op.name in self._arguments or op.name not in self._division.repeated:
            return self.taken.setdefault(tensor.name, f"taken_{len(self.taken)}:0")
        value = None if op.type == "Const" else self._division.sizes.folded(tensor)
        if value is not None:
            return self._constant(tensor, value)
        self._add(op)
        return self.renamed(tensor.name)

    def _behind_barrier(self, tensor: tf.Tensor, name: str) -> str:
        """The input of an operation that computes again: XLA would take what was computed before."""
        source = tensor.op
        if AGAIN in source.node_def.attr or source.name in self._division.repeated:
            return name
        key = f"{tensor.name}/barrier"
        if key not in self._names:
            node = self.graph_def.node.add()
            node.name = self._names[key] = f"n{len(self._names)}"
            node.op = "XlaOptimizationBarrier"
            node.input.append(name)
            node.attr["T"].list.type.append(tensor.dtype.as_datatype_enum)
        return f"{self._names[key]}:0"

    def _constant(self, tensor: tf.Tensor, value) -> str:
        key = f"{tensor.op.name}/value_{tensor.value_index}"
        if key not in self._names:
            node = self.graph_def.node.add()
            node.name = self._names[key] = key if self._plain else f"n{len(self._names)}"
            node.op = "Const"
            node.attr["dtype"].type = tensor.dtype.as_datatype_enum
            proto = tf.make_tensor_proto(value, tensor.dtype, tensor.shape)
            node.attr["value"].tensor.CopyFrom(proto)
        return f"{self._names[key]}:0"

    def _new(self, op: tf.Operation) -> node_def_pb2.NodeDef:
        node = self.graph_def.node.add()
        node.CopyFrom(op.node_def)
        del node.input[:]
        node.attr.pop("_class", None)
        self._nodes[op.name] = node
        if self._plain:
            self._names[op.name] = node.name
            return node
        node.name = self._names[op.name] = f"n{len(self._names)}"
        node.device = ""
        if node.op in COPIES:
            node.op = "Identity"
        for name in [name for name in node.attr if name.startswith("_") and name not in _NEEDED]:
            del node.attr[name]
        return node
