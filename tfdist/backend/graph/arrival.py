"""Makes the collectives of a step wait for its batch, including those that do not depend on it.

TensorFlow runs each operation of a graph as soon as its inputs are computed. At the end of a dataset of
unknown length there is no batch: the step ends with an error, at different points on the ranks, and messages
that some ranks have sent by then are not received.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import tensorflow as tf

from tfdist.backend import devices
from tfdist.utils.temporary import attributes_set


class _Local(threading.local):
    arrival: tf.Operation | None = None


_local = _Local()


def after_arrival(batch: Any) -> contextlib.AbstractContextManager[None]:
    """Has `arrival` inside wait for all tensors of a batch.

    Args:
        batch: A nest, of which only tensors of the traced graph matter.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    sources = {
        part.op
        for part in tf.nest.flatten(batch, expand_composites=True)
        if tf.is_symbolic_tensor(part) and part.graph is graph
    }
    if graph is not None and not sources:
        return contextlib.nullcontext()
    if not sources:
        return attributes_set(_local, arrival=None)
    # One operation to wait for, regardless of the number of tensors; batches arrive in the memory of the host.
    with devices.on_host():
        return attributes_set(_local, arrival=tf.group(*sources, name="arrival"))


def arrival() -> contextlib.AbstractContextManager:
    """Has operations inside run after the batch of the traced step has arrived.

    This includes inner graphs, such as those of conditions and loops, which then run after it.
    """
    if _local.arrival is None or tf.executing_eagerly():
        return contextlib.nullcontext()
    return tf.control_dependencies([_local.arrival])
