"""Names of collectives, the same on all ranks without a word exchanged."""

from __future__ import annotations

import collections
import re
import weakref

import tensorflow as tf

_used_in: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def unique_name(label: str) -> str:
    """Returns `label`, numbered among the same labels of the outermost graph being built.

    The n-th collective of a step must meet the n-th of the others. A counter over the life of the
    process would run apart as soon as one rank traces a function once more than another (a new
    input shape, say); counting anew in each outermost graph keeps the names equal whatever the
    other graphs did. Eager calls block, so there the label alone is name enough.
    """
    label = re.sub(r"[^A-Za-z0-9_./+-]", "_", label)
    if tf.executing_eagerly():
        return label
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None and hasattr(
        graph.outer_graph, "outer_graph"
    ):
        graph = graph.outer_graph
    used = _used_in.setdefault(graph, collections.Counter())
    number = used[label]
    used[label] += 1
    return f"{label}.{number}"
