"""Names of collectives, which are the same on all ranks without communication."""

from __future__ import annotations

import collections
import re
import weakref

import tensorflow as tf

_used_in: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def backward_name(name: str | None) -> str:
    """The name of a collective in the gradient of the one with a given name."""
    return f"{name}/backward" if name else "backward"


def unique_name(label: str) -> str:
    """Returns `label`, numbered among the same labels of the outermost graph under construction.

    The n-th collective of a step must match the n-th of the other ranks. A counter per process would
    diverge as soon as one rank traces a function once more than another (a new input shape, say);
    counting from zero in each outermost graph keeps the names equal regardless of the other graphs. Eager
    calls block, so there the label alone is sufficient.
    """
    label = re.sub(r"[^A-Za-z0-9_./+-]", "_", label)
    if tf.executing_eagerly():
        return label
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    used = _used_in.setdefault(graph, collections.Counter())
    used[label] += 1
    return f"{label}.{used[label] - 1}"
