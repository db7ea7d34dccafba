"""The tensors of a graph that are the same on all ranks of a group, as results of collectives."""

from __future__ import annotations

import weakref

import tensorflow as tf

#: By graph, the names of tensors, and whether they are sums.
_shared: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def note_shared(tensor, *, is_sum: bool = False):
    """Records that all ranks of a group have the same tensor; returns it. Eager ones are ignored."""
    if tf.is_symbolic_tensor(tensor):
        _shared.setdefault(tensor.graph, {})[tensor.name] = is_sum
    return tensor


def is_shared(tensor) -> bool:
    """Whether a tensor of a graph was recorded."""
    return tf.is_symbolic_tensor(tensor) and tensor.name in _shared.get(tensor.graph, ())


def is_sum_over_ranks(tensor) -> bool:
    """Whether a tensor of a graph was recorded as a sum."""
    return is_shared(tensor) and _shared[tensor.graph][tensor.name]
