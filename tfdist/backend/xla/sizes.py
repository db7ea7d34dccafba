"""Which tensors of a graph have sizes, or values, that depend on the values of others.

XLA compiles for fixed sizes: once for each combination of sizes that occurs. A size that depends on the values
of a batch would be another one in each step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.backend.graph.compiling import is_sized_by_values
from tfdist.backend.xla.registry import compiled_operations

#: Their outputs are the same in each step.
CONSTANTS = frozenset({"Const", "StatelessRandomGetAlg"})
#: Sizes of their outputs depend on values.
_SIZED_BY_VALUES = frozenset(
    {
        "DynamicPartition",
        "RaggedRange",
        "Unique",
        "UniqueV2",
        "UniqueWithCounts",
        "UniqueWithCountsV2",
        "Where",
    }
)
_SHAPES = frozenset({"Rank", "Shape", "ShapeN", "Size"})
#: Only the input with the shape determines the sizes of their output.
_SHAPED = {"BroadcastTo": "shape", "Fill": "dims", "Reshape": "shape"}
#: The most elements of a tensor that is folded.
_MOST_FOLDED = 256


def inputs_by_name(op: tf.Operation) -> dict[str, list[tf.Tensor]]:
    """The inputs of an operation, by the name of the argument."""
    found, place, given = {}, 0, list(op.inputs)
    for argument in op.op_def.input_arg:
        count = 1
        if argument.number_attr:
            count = op.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(op.get_attr(argument.type_list_attr))
        found[argument.name] = given[place : place + count]
        place += count
    return found


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What is known of the inputs of a graph.

    Attributes:
        known: Whether the value of each is known from sizes.
        varying: Whether the sizes of each depend on values.
        on_host: Whether each is a variable in the memory of the host of a rank with a GPU.
    """

    known: tuple[bool, ...]
    varying: tuple[bool, ...]
    on_host: tuple[bool, ...]

    def names(self, flags: Sequence[bool], inputs: Sequence[tf.Tensor]) -> set[str]:
        """The names of the inputs with a flag."""
        return {tensor.name for tensor, flag in zip(inputs, flags, strict=True) if flag}


class Sizes:
    """The sizes and values in a graph that are known once the sizes of its inputs are.

    Args:
        operations: The operations of the graph, each after those that it depends on.
        tensors: The inputs of the graph.
        inputs: What is known of them.

    Attributes:
        on_host: The names of the inputs that are variables in the memory of the host.
    """

    def __init__(
        self, operations: Sequence[tf.Operation], tensors: Sequence[tf.Tensor], inputs: Inputs
    ):
        self._known = inputs.names(inputs.known, tensors)
        self._varying = inputs.names(inputs.varying, tensors)
        self.on_host = inputs.names(inputs.on_host, tensors)
        self._folded: dict[str, object] = {}
        arguments = {each.op.name for each in tensors}
        for op in operations:
            if op.name not in arguments:
                self._visit(op)

    def is_known(self, tensor: tf.Tensor) -> bool:
        """Whether the value of a tensor is known from sizes."""
        return tensor.name in self._known

    def inputs_of(self, tensors: Sequence[tf.Tensor]) -> Inputs:
        """What is known of tensors that are passed to a function."""
        return Inputs(
            tuple(map(self.is_known, tensors)),
            tuple(map(self.varies, tensors)),
            tuple(tensor.name in self.on_host for tensor in tensors),
        )

    def varies(self, tensor: tf.Tensor) -> bool:
        """Whether the sizes of a tensor depend on values."""
        return tensor.name in self._varying

    def folded(self, tensor: tf.Tensor):
        """The value of a small integer or bool tensor, if it is known without running the graph; else None."""
        if tensor.name not in self._folded:
            self._folded[tensor.name] = None
            elements = tensor.shape.num_elements()
            is_small = elements is not None and elements <= _MOST_FOLDED
            if is_small and tensor.dtype in (tf.int32, tf.int64, tf.bool):
                self._folded[tensor.name] = tf.get_static_value(tensor)
        return self._folded[tensor.name]

    def lacking(self, op: tf.Operation) -> str | None:
        """The name of an input of an operation that XLA needs as a constant, and whose value is not known."""
        wanted = compiled_operations().get(op.type)
        if not wanted:
            return None
        for name, tensors in inputs_by_name(op).items():
            if name in wanted and not all(map(self.is_known, tensors)):
                return name
        return None

    def _visit(self, op: tf.Operation) -> None:
        varying = any(map(self.varies, op.inputs))
        known = op.type in CONSTANTS or (op.type in _SHAPES and not varying)
        if not known and op.inputs and not op._is_stateful and op.type in compiled_operations():
            known = all(map(self.is_known, op.inputs))
        for output in op.outputs:
            if known or self.folded(output) is not None:
                self._known.add(output.name)
        if known or all(output.shape.is_fully_defined() for output in op.outputs):
            return
        if op.type in _SHAPED:
            shape = inputs_by_name(op)[_SHAPED[op.type]]
            has_rest = op.type == "Reshape" and _has_rest(shape[0])
            varying = not all(map(self.is_known, shape)) or (varying and has_rest)
        elif op.type in _SIZED_BY_VALUES or is_sized_by_values(op) or self.lacking(op):
            varying = True
        if varying:
            self._varying |= {
                output.name
                for output in op.outputs
                if output.dtype != tf.resource and not output.shape.is_fully_defined()
            }


def _has_rest(shape: tf.Tensor) -> bool:
    """Whether one of the sizes of a new shape, -1, is that of the remaining elements."""
    op = shape.op
    if op.type in ("Cast", "ConcatV2", "Identity", "Pack"):
        return any(map(_has_rest, op.inputs[:-1] if op.type == "ConcatV2" else op.inputs))
    return op.type == "Const" and bool((tf.get_static_value(shape) == -1).any())
