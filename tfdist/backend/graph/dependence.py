"""Whether a tensor of a graph depends on the batch, or is the same on every rank.

The gradient of `Embedding(arange(length))`, as positions are embedded, has a row for each position: one
process adds up the rows of the batch before the lookup's gradient. That of `Embedding(tokens)` has a row
for each token of the batch. The values of the ids do not tell the two apart; where they come from does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import tensorflow as tf

#: By graph, the names of tensors that were marked.
_marked: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def mark_independent(tensor: tf.Tensor) -> None:
    """Notes that a tensor does not depend on the batch, where its graph does not show it."""
    _marked.setdefault(tensor.graph, set()).add(tensor.name)


def is_independent_of_batch(tensor: tf.Tensor) -> bool:
    """Whether a tensor is made of constants, variables, and sizes of dims but the first.

    Args:
        tensor: A tensor of a graph. What is not known to be independent counts as dependent.
    """
    return trace_back([tensor], lambda tensor: False)[1]


def trace_back(
    tensors: Iterable[tf.Tensor], is_end: Callable[[tf.Tensor], bool]
) -> tuple[list[tf.Tensor], bool]:
    """Follows tensors of a graph back to what they are made of.

    Args:
        tensors: The tensors.
        is_end: Whether a tensor is not followed further.

    Returns:
        The ends that were come by, and whether the tensors are independent of the batch, as
        `is_independent_of_batch` has it, if these ends are.
    """
    known: set[tuple[int, str]] = set()
    ends: list[tf.Tensor] = []
    waiting, is_independent = list(tensors), True
    while waiting:
        tensor = waiting.pop()
        if is_end(tensor):
            ends.append(tensor)
            continue
        if not tf.is_symbolic_tensor(tensor):
            continue  # Made outside of the graph.
        key = id(tensor.graph), tensor.name
        if key in known:
            continue
        known.add(key)
        sources = _sources(tensor)
        if sources is None:
            is_independent = False
            sources = _inputs(tensor)
        waiting += sources
    return ends, is_independent


def _inputs(tensor) -> list:
    """What an operation has taken, also from the graph around its own."""
    if tensor.op.type == "Placeholder":
        outer = {inner.name: outer for outer, inner in getattr(tensor.graph, "captures", ())}
        return [outer[tensor.name]] if tensor.name in outer else []
    return list(tensor.op.inputs)


def _sources(tensor) -> list | None:
    """What a tensor is made of; None where it depends on the batch, or may do so."""
    operation = tensor.op
    if tensor.name in _marked.get(tensor.graph, ()):
        return []
    if operation.type == "Placeholder":
        outer = {inner.name: outer for outer, inner in getattr(tensor.graph, "captures", ())}
        return [outer[tensor.name]] if tensor.name in outer else None
    if operation.type == "ReadVariableOp":
        return list(operation.inputs)
    if operation.type == "StridedSlice" and operation.inputs[0].op.type == "Shape":
        return [] if _is_inner_size(operation) else None
    if operation.type in ("Shape", "Size", "PlaceholderWithDefault") or _is_stateful(operation):
        return None
    if operation.type == "Reshape":
        return [operation.inputs[0]]  # What it is reshaped to does not change the values.
    return list(operation.inputs)


def _is_inner_size(operation: tf.Operation) -> bool:
    """Whether a slice of a shape is the size of one dim, and not of the first, which has the rows."""
    begin = tf.get_static_value(operation.inputs[1])
    rank = operation.inputs[0].op.inputs[0].shape.rank
    if begin is None or not operation.get_attr("shrink_axis_mask"):
        return False
    place = int(begin[0])
    return place > 0 or (rank is not None and -rank < place < 0)


def _is_stateful(operation: tf.Operation) -> bool:
    return operation.op_def is None or operation.op_def.is_stateful
