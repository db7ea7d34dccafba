"""Operations whose order among the other side effects of a `tf.function` does not matter."""

from __future__ import annotations

import tensorflow as tf


def in_any_order(op: tf.Operation) -> None:
    """Excludes an operation from the automatic control dependencies of a `tf.function`.

    Otherwise each stateful operation would wait for all that were traced before it: a deadlock if it is a message
    to which one of these is the answer, and a wait of the host if one of them is on a GPU.

    `Graph.experimental_acd_manager` is experimental in TensorFlow, which has no other way.
    `tests/backend/graph/test_order.py` fails if it changes.

    Raises:
        ImportError: This TensorFlow implements the control dependencies differently.
    """
    try:
        manager = op.graph.experimental_acd_manager
        if manager is not None:  # None in a graph of TensorFlow 1, which has no such dependencies.
            manager.run_independently(op)
    except AttributeError as error:
        raise ImportError(
            "tfdist requires Graph.experimental_acd_manager.run_independently of TensorFlow. Received: "
            f"TensorFlow {tf.__version__}. Install a supported version, or a newer tfdist."
        ) from error
