"""Graphs that become functions which TensorFlow does not inline, and the graphs that call them."""

from __future__ import annotations

import weakref

import tensorflow as tf

_separate: weakref.WeakSet = weakref.WeakSet()


def mark_separate(graph: tf.Graph) -> None:
    """Marks a graph whose operations run in functions that its outer graph calls."""
    _separate.add(graph)


def caller_of_graph(graph: tf.Graph) -> tf.Graph | None:
    """The graph that calls the function of a marked graph, also from a graph inside of it.

    Returns:
        None if the graph is not part of a marked one, or if the function is called eagerly.
    """
    while (outer := getattr(graph, "outer_graph", None)) is not None and outer.building_function:
        if graph in _separate:
            return outer
        graph = outer
    return None
