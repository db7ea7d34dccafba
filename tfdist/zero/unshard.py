"""ZeRO-3 in the graph of a step: the gathering of parameters, and a second one for the backward pass.

TensorFlow's gradients use the tensors of the forward pass, so gathered parameters would stay in memory until
the backward pass has used them. Instead, the backward pass uses the parameters of a second gathering, which
begins when it reaches the layer after.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.backend.graph.rematerialize import Region, replace
from tfdist.backend.graph.split import CHEAP
from tfdist.backend.keras.private import copy_keras_masks, in_stateless_scope
from tfdist.zero.sharded_gradients import shard_gradients
from tfdist.zero.sharded_variable import (
    ShardedVariable,
    as_shards,
    gather_arrays,
    given,
    holds,
    is_given,
    read_arrays,
    shard_variable,
)

__all__ = ["as_shards", "call_gathered", "gathered", "gathered_for_step", "shard_variable"]

#: Operations that a layer may apply to a parameter before its use, cheap enough to repeat.
_CHEAP = CHEAP | {"ConcatV2", "Const", "Slice", "Split", "SplitV", "Transpose", "Unpack"}

#: By graph, the calls of layers with gathered parameters, in order.
_calls: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def call_gathered(original, self, *args, **kwargs):
    """Gathers the parameters of an outermost layer for a call; the layers of a model gather theirs."""
    if not ShardedVariable.exist or isinstance(self, keras.Model) or in_stateless_scope():
        return original(self, *args, **kwargs)
    sharded = [v for v in self.variables if isinstance(v, ShardedVariable) and not v.is_whole]
    inputs = [part for part in tf.nest.flatten((args, kwargs)) if tf.is_tensor(part)]
    if not sharded or all(map(is_given, sharded)) or not inputs:
        return original(self, *args, **kwargs)
    with gathered(self.path or self.name, sharded, inputs) as leave:
        outputs = original(self, *args, **kwargs)
    left = leave(outputs)
    copy_keras_masks(outputs, left)
    return left


@contextlib.contextmanager
def gathered(
    name: str, variables: Sequence[ShardedVariable], inputs: Sequence[tf.Tensor]
) -> Iterator[Callable]:
    """Gathers the parameters of a layer for the duration of a call.

    Args:
        name: The layer's name.
        variables: Its sharded variables.
        inputs: The tensors that it is called with.

    Yields:
        A function to apply to the outputs of the layer.
    """
    what = f"parameters/{name}"
    if tf.executing_eagerly():
        with given(variables, gather_arrays(variables, what)):
            yield lambda outputs: outputs
        return
    calls = _calls.setdefault(tf.compat.v1.get_default_graph(), [])
    call = _Call(what, variables, inputs)
    # One layer ahead: the gathering starts when the layer before this one has its inputs.
    with tf.control_dependencies([tensor for before in calls[-1:] for tensor in before.inputs]):
        call.arrays = gather_arrays(variables, what, call.gather_again, call.reduced.extend)
    calls.append(call)
    call.region = Region()
    with given(variables, call.arrays):
        yield call.region.end
        # A second gathering would return the values that the layer has assigned.
        call.assigns = not all(map(holds, variables, call.arrays))


@contextlib.contextmanager
def gathered_for_step(
    groups: Sequence[Sequence[ShardedVariable]], name: str
) -> Iterator[Callable[[Mapping[int, Any]], dict[int, Any]]]:
    """Gathers parameters before a step that runs its layers many times, such as that of a pipeline.

    Args:
        groups: The variables; those of a group are sent together.
        name: The name of the collectives, for messages.

    Yields:
        A function from gradients of the arrays, by the id of the variable, to gradients of the shards,
        reduced over the ranks. It does not change other gradients, and must be called once.
    """
    variables = [variable for group in groups for variable in group]
    arrays: list[tf.Tensor] = []
    for number, group in enumerate(groups):
        arrays += gather_arrays(group, f"parameters/{name}{number}")

    def to_shards(gradients: Mapping[int, Any]) -> dict[int, Any]:
        found = dict(gradients)
        for number, group in enumerate(groups):
            trained = [variable for variable in group if found.get(id(variable)) is not None]
            wanted = [found[id(variable)] for variable in trained]
            shards = shard_gradients(trained, wanted, f"parameters/{name}{number}")
            found |= {id(v): shard for v, shard in zip(trained, shards, strict=True)}
        return found

    with given(variables, arrays):
        yield to_shards


class _Call:
    """A call of a layer with gathered parameters."""

    arrays: list[tf.Tensor]
    region: Region

    def __init__(self, what: str, variables: Sequence[ShardedVariable], inputs):
        self.what, self.variables, self.inputs = what, list(variables), list(inputs)
        self.reduced: list[tf.Tensor] = []
        self.assigns = False

    def gather_again(self) -> None:
        """Called when the backward pass through the layer is in the graph."""
        graph = self.region.graph
        calls = _calls[graph]
        behind = [c for c in calls[calls.index(self) + 1 :] if c.region.backward is not None]
        if self.region.backward is None or not behind or self.assigns:
            # The last layer of the forward pass is needed again at once.
            return
        if not all(call.region.is_passed_once for call in (self, *behind)):
            return
        made = [tensor for o in self._made_of_parameters() for tensor in o.outputs]
        if _is_followed_by_collective([*self.arrays, *made], self.region.backward):
            return
        # Where computation is faster than communication, gradients in flight must not accumulate.
        earlier = [shard for call in behind[1:2] for shard in call.reduced]
        with graph.as_default(), tf.control_dependencies([*behind[0].region.arrived, *earlier]):
            arrays = read_arrays(self.variables, f"{self.what}/again")
        names = {before.name: now for before, now in zip(self.arrays, arrays, strict=True)}
        self.region.repeat(self._made_of_parameters(), names)
        replace(self.arrays, arrays, self.region.backward)

    def _made_of_parameters(self) -> list[tf.Operation]:
        """The operations of the layer that only reshape, slice or cast parameters."""
        known = {array.name for array in self.arrays}
        found = []
        for operation in self.region.operations():
            inputs = [t for t in operation.inputs if t.op.type != "Const"]
            if operation.type in _CHEAP and inputs and all(t.name in known for t in inputs):
                found.append(operation)
                known |= {tensor.name for tensor in operation.outputs}
        return found


def _is_followed_by_collective(arrays: Sequence[tf.Tensor], backward: int) -> bool:
    """Whether a collective in the graph depends on arrays.

    TensorFlow runs its collectives in the order in which they were traced. A second gathering would have to
    run both after and before such a collective. The backward pass is traced breadth-first, so it can finish
    a layer whose parameters are far from its inputs, such as T5's relative positions, after the layer before.

    Args:
        arrays: Tensors of one graph.
        backward: The number of operations in the graph when the backward pass through their layer began.
    """
    late = arrays[0].graph.get_operations()[backward:]
    if not any(operation.type.startswith("Collective") for operation in late):
        return False
    reached = {array.name for array in arrays}
    waits = [[t.name for t in o.inputs] + [c.name for c in o.control_inputs] for o in late]
    found = -1
    while found != len(reached):  # Replaced uses can depend on later operations.
        found = len(reached)
        for operation, before in zip(late, waits, strict=True):
            if operation.name not in reached and not reached.isdisjoint(before):
                if operation.type.startswith("Collective"):
                    return True
                reached |= {operation.name, *[tensor.name for tensor in operation.outputs]}
    return False
