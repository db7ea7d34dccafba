"""Which tensors of a graph are sums over ranks."""

from __future__ import annotations

import weakref

import tensorflow as tf

__all__ = ["is_sum_over_ranks", "note_sum"]

#: By graph, the names of tensors.
_sums: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def note_sum(tensor) -> None:
    """Notes that a tensor is a sum over ranks; eager ones are not told apart."""
    if tf.is_symbolic_tensor(tensor):
        _sums.setdefault(tensor.graph, set()).add(tensor.name)


def is_sum_over_ranks(tensor) -> bool:
    """Whether a tensor of a graph was noted."""
    return tf.is_symbolic_tensor(tensor) and tensor.name in _sums.get(tensor.graph, ())
