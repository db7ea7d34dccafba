"""Collectives of a step wait for its batch, also those that do not depend on it.

TensorFlow runs each operation of a graph as soon as its inputs are there. At the end of a data set
whose length is unknown there is no batch: the step ends with an error, at another point on each rank,
and what some ranks have sent by then nobody receives.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


class _Local(threading.local):
    arrival: tf.Operation | None = None


_local = _Local()


@contextlib.contextmanager
def after_arrival(batch: Any) -> Iterator[None]:
    """Inside, `arrival` waits for all tensors of a batch.

    Args:
        batch: A nest, of which the tensors of the graph that is traced count.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    sources = {
        part.op
        for part in tf.nest.flatten(batch, expand_composites=True)
        if tf.is_symbolic_tensor(part) and part.graph is graph
    }
    before = _local.arrival
    if graph is None or sources:
        # One operation to wait for, however many tensors there are.
        _local.arrival = tf.group(*sources, name="arrival") if sources else None
    try:
        yield
    finally:
        _local.arrival = before


def arrival() -> contextlib.AbstractContextManager:
    """Inside, operations run after the batch of the step that is traced has come.

    Also in graphs inside of the step's, as those of conditions and loops, which then run after it.
    """
    if _local.arrival is None or tf.executing_eagerly():
        return contextlib.nullcontext()
    return tf.control_dependencies([_local.arrival])
