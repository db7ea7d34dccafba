"""An order of the operations of a part that depends on what they compute, and not on their places in a graph.

The gradients of equal layers have equal operations in other orders, because TensorFlow adds them as their inputs become
known. Parts that are equal in this order are compiled once.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence

import tensorflow as tf


def canonical_order(
    operations: Sequence[tf.Operation], before: Mapping[str, Sequence[str]]
) -> list[tf.Operation]:
    """The operations by their distance from the begin, what they compute, and what uses them.

    Args:
        operations: Some operations of a graph, none before its inputs.
        before: By operation, the names of those that must run before it.

    Returns:
        The same operations, none before its inputs.
    """
    own = {op.name for op in operations}
    kind_of = functools.cache(_kind)
    levels: dict[str, int] = {}
    kinds: dict[str, str] = {}
    for op in operations:
        parts, level = [kind_of(op)], 0
        for tensor in op.inputs:
            source = tensor.op
            if source.name in own:
                level = max(level, levels[source.name] + 1)
                parts.append(f"{kinds[source.name]}:{tensor.value_index}")
            else:
                # What the part takes from elsewhere, or repeats.
                kind = kind_of(source) if source.type == "Const" else ""
                parts.append(f"{tensor.dtype.name}{tensor.shape}{kind}")
        waits = [levels.get(name, -1) + 1 for name in before.get(op.name, ())]
        levels[op.name], kinds[op.name] = max([level, *waits]), _digest(parts)
    users: dict[str, list[tuple[str, str]]] = {op.name: [] for op in operations}
    uses: dict[str, str] = {}
    for op in reversed(operations):
        found = (f"{place}{kinds[name]}{uses[name]}" for name, place in users[op.name])
        uses[op.name] = _digest(sorted(found))
        for number, tensor in enumerate(op.inputs):
            if tensor.op.name in own:
                users[tensor.op.name].append((op.name, f"{tensor.value_index}>{number}:"))
    # From the end on: which of several equal operations comes first follows from the places of their users.
    places: dict[str, tuple[int, int]] = {}
    by_level: dict[int, list[tf.Operation]] = {}
    for op in operations:
        by_level.setdefault(levels[op.name], []).append(op)
    for level in sorted(by_level, reverse=True):
        by_level[level].sort(
            key=lambda op: (
                kinds[op.name],
                uses[op.name],
                sorted((places[name], place) for name, place in users[op.name]),
            )
        )
        places |= {op.name: (level, rank) for rank, op in enumerate(by_level[level])}
    return [op for level in sorted(by_level) for op in by_level[level]]


def _kind(op: tf.Operation) -> str:
    """What an operation computes from its inputs."""
    given = op.node_def.attr
    names = [name for name in sorted(given) if not name.startswith("_")]
    return _digest(
        [op.type, *(repr(given[n].SerializeToString(deterministic=True)) for n in names)]
    )


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha1("\n".join(parts).encode(), usedforsecurity=False).hexdigest()
