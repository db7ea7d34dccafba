"""Determines whether a tensor of a graph depends on the batch, or is the same on every rank.

The gradient of `Embedding(arange(length))`, as used for positions, has a row for each position: a single
process sums the rows of the batch before the lookup's gradient. That of `Embedding(tokens)` has a row
for each token of the batch. The values of the ids do not distinguish the two cases, but their origin does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import tensorflow as tf

#: By graph, the names of marked tensors.
_marked: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def mark_independent(tensor: tf.Tensor) -> None:
    """Marks a tensor as independent of the batch, if its graph does not show it."""
    _marked.setdefault(tensor.graph, set()).add(tensor.name)


def is_independent_of_batch(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from constants, variables, and sizes of dims except the first.

    Args:
        tensor: A tensor of a graph. It counts as dependent unless it is known to be independent.
    """
    return trace_back([tensor], lambda tensor: False)[1]


def trace_back(
    tensors: Iterable[tf.Tensor], is_end: Callable[[tf.Tensor], bool]
) -> tuple[list[tf.Tensor], bool]:
    """Follows tensors of a graph back to their inputs.

    Args:
        tensors: The tensors.
        is_end: Whether a tensor is not followed further.

    Returns:
        The ends that were reached, and whether the tensors are independent of the batch in the sense of
        `is_independent_of_batch`, if these ends are.
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
            continue  # Created outside the graph.
        key = id(tensor.graph), tensor.name
        if key in known:
            continue
        known.add(key)
        sources = _sources(tensor)
        is_independent &= sources is not None
        waiting += _inputs(tensor) if sources is None else sources
    return ends, is_independent


def _inputs(tensor) -> list:
    """The inputs of a tensor's operation, also from the outer graph."""
    if tensor.op.type == "Placeholder":
        captures = getattr(tensor.graph, "captures", ())
        return [outer for outer, inner in captures if inner.name == tensor.name]
    return list(tensor.op.inputs)


def _sources(tensor) -> list | None:
    """The inputs on whose values a tensor depends; None if it depends on the batch, or may do so."""
    operation = tensor.op
    if tensor.name in _marked.get(tensor.graph, ()):
        return []
    if operation.type == "Placeholder":
        return _inputs(tensor) or None
    if operation.type == "ReadVariableOp":
        return _inputs(tensor)
    if operation.type == "StridedSlice" and operation.inputs[0].op.type == "Shape":
        return [] if _is_inner_size(operation) else None
    is_stateful = operation.op_def is None or operation.op_def.is_stateful
    if operation.type in ("Shape", "Size", "PlaceholderWithDefault") or is_stateful:
        return None
    # The shape of a Reshape does not change the values.
    return _inputs(tensor)[:1] if operation.type == "Reshape" else _inputs(tensor)


def _is_inner_size(operation: tf.Operation) -> bool:
    """Whether a slice of a shape is the size of one dim other than the first, which has the rows."""
    begin = tf.get_static_value(operation.inputs[1])
    rank = operation.inputs[0].op.inputs[0].shape.rank
    if begin is None or not operation.get_attr("shrink_axis_mask"):
        return False
    place = int(begin[0])
    return place > 0 or (rank is not None and -rank < place < 0)
