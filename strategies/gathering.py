"""ZeRO-3 in a step's graph: when parameters are gathered, and that the backward pass does it again.

TensorFlow's gradients use the very tensors of the forward pass, so parameters that were gathered
for it would stand until the backward pass is through with them. When the graph of both is there,
what the backward pass takes of a layer's parameters is taken from a second gathering instead,
which begins when the backward pass reaches the layer behind it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdist.strategies.sharded_parameters import (
    ShardedVariable,
    gather_arrays,
    given,
    read_arrays,
)

__all__ = ["LayerCall", "calling", "gather_again"]

#: Operations that a layer may put between a parameter and its use, cheap enough to be repeated.
_CHEAP = frozenset(
    [
        "Cast",
        "ConcatV2",
        "Const",
        "ExpandDims",
        "Identity",
        "Pack",
        "Reshape",
        "Slice",
        "Split",
        "SplitV",
        "Squeeze",
        "StridedSlice",
        "Transpose",
        "Unpack",
    ]
)


@dataclasses.dataclass(eq=False)
class LayerCall:
    """A call of a layer whose parameters were gathered for it.

    Attributes:
        name: The layer's name.
        variables: Its sharded variables.
        arrays: What was gathered.
        inputs: Tensors that it was called with.
        first: The number of operations in the graph when it began.
        last: That when it ended.
        outputs: Tensors that it returned.
        arrived: The gradients of its outputs, once the backward pass has reached it.
        backward: The number of operations in the graph then.
    """

    name: str
    variables: list[ShardedVariable]
    arrays: list[tf.Tensor]
    inputs: list[tf.Tensor]
    first: int = 0
    last: int = 0
    outputs: list[tf.Tensor] = dataclasses.field(default_factory=list)
    arrived: list[tf.Tensor] = dataclasses.field(default_factory=list)
    backward: int | None = None

    def watch(self, outputs):
        """The outputs, noting when their gradients come."""
        return tf.nest.map_structure(
            lambda y: self._watched(y) if tf.is_tensor(y) and y.dtype.is_floating else y, outputs
        )

    def _watched(self, tensor: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def identity(y):
            def gradient(dy):
                if self.backward is None:
                    self.backward = _size(tf.compat.v1.get_default_graph())
                self.arrived.append(dy)
                return dy

            return tf.identity(y), gradient

        self.outputs.append(tensor)
        return identity(tensor)


@contextlib.contextmanager
def calling(
    name: str, variables: Sequence[ShardedVariable], inputs: Sequence[tf.Tensor], calls: list
) -> Iterator[LayerCall]:
    """Gathers a layer's parameters, for as long as it is called.

    Args:
        name: The layer's name.
        variables: Its sharded variables.
        inputs: The tensors that it is called with.
        calls: The calls of the step so far, to which this one is added.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    before = [call for call in calls[-1:] if graph is not None and call.arrays[0].graph is graph]
    # One layer ahead, not all at once: when the layer before this one has its inputs.
    with tf.control_dependencies([tensor for call in before for tensor in call.inputs]):
        arrays = gather_arrays(variables, f"parameters/{name}")
    call = LayerCall(name, list(variables), arrays, list(inputs))
    if graph is not None:
        calls.append(call)
        call.first = _size(graph)
    with given(variables, arrays):
        yield call
    if graph is not None:
        call.last = _size(graph)


def gather_again(calls: Sequence[LayerCall]) -> None:
    """Has the backward pass gather the parameters of each layer but the last by itself.

    Args:
        calls: The calls of a step whose gradients have just been taken.
    """
    reached = [call for call in calls if call.backward is not None]
    if not reached:
        return
    # Not always the current one: with a loss scale an optimizer's step is a branch of its own.
    graph = reached[-1].arrays[0].graph
    reached = [call for call in reached if call.arrays[0].graph is graph]
    operations = graph.get_operations()
    begin = min(call.backward for call in reached if call.backward is not None)
    backward = set(operations[begin:])
    # The layer that the forward pass ends with is needed again at once.
    for call, behind in itertools.pairwise(reached):
        uses = _uses(call, operations[call.first : call.last], backward)
        if not uses:
            continue
        with graph.as_default(), tf.control_dependencies(behind.arrived):
            arrays = read_arrays(call.variables, f"parameters/{call.name}/again")
            again = dict(zip([array.name for array in call.arrays], arrays, strict=True))
            for consumer, place, tensor in uses:
                # Private, and the only way to change what an operation takes.
                consumer._update_input(place, _repeat(tensor, again))


def _uses(call: LayerCall, forward: Sequence, backward: set) -> list[tuple]:
    """Where the backward pass takes the parameters of a call, or what is cheaply made of them.

    Returns:
        Operations, the places of their inputs, and the tensors there.
    """
    returned = {tensor.name for tensor in call.outputs}
    found = {array.name: array for array in call.arrays}
    for operation in forward:
        known = [t.name in found or t.op.type == "Const" for t in operation.inputs]
        of_parameters = any(t.name in found for t in operation.inputs)
        if operation.type in _CHEAP and of_parameters and all(known):
            found |= {t.name: t for t in operation.outputs if t.name not in returned}
    return [
        (consumer, place, tensor)
        for tensor in found.values()
        for consumer in tensor.consumers()
        if consumer in backward
        for place, taken in enumerate(consumer.inputs)
        if taken.name == tensor.name
    ]


def _repeat(tensor: tf.Tensor, again: dict) -> tf.Tensor:
    """A tensor that is made of parameters, made once more of those that `again` maps them to."""
    if tensor.name in again:
        return again[tensor.name]
    operation = tensor.op
    if operation.type == "Const":
        return tensor
    inputs = [_repeat(each, again) for each in operation.inputs]
    copy = operation.graph.create_op(
        operation.type,
        inputs,
        [output.dtype for output in operation.outputs],
        attrs=dict(operation.node_def.attr),
        name=f"{operation.name}/again",
    )
    for before, after in zip(operation.outputs, copy.outputs, strict=True):
        after.set_shape(before.shape)
        again[before.name] = after
    return again[tensor.name]


def _size(graph: tf.Graph) -> int:
    return len(graph.get_operations())
