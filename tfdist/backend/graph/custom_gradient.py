"""`tf.custom_gradient` whose functions are freed with their graphs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.framework import ops


def custom_gradient(function: Callable) -> Callable:
    """As `tf.custom_gradient`.

    TensorFlow stores the gradient of each call in a graph under a unique name in a table of the process,
    and with it all objects that it refers to: the graph would never be freed. Here the operation owns
    the gradient, and the table has a weak reference to it.

    The table (`ops.gradient_registry`) is internal to TensorFlow;
    `tests/backend/graph/test_custom_gradient.py` fails if it changes.

    Args:
        function: Maps tensors to a pair: the outputs, and a function from their gradients to the
            gradients of the tensors.
    """
    wrapped = tf.custom_gradient(function)

    # As with TensorFlow's own functions.
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(function)
    def call(*args, **kwargs):
        given = tf.nest.flatten((args, kwargs), expand_composites=True)
        dtypes = {each.dtype for each in given if tf.is_tensor(each)}
        if dtypes and all(dtype.is_integer or dtype.is_bool for dtype in dtypes):
            # TensorFlow's wrapper would copy integers of the host to a GPU and back.
            return function(*args, **kwargs)[0]
        outputs = wrapped(*args, **kwargs)
        for output in tf.nest.flatten(outputs, expand_composites=True):
            if tf.is_symbolic_tensor(output) and output.op.type == "IdentityN":
                _hold(output.op)
                break
        return outputs

    return call


def _hold(operation: tf.Operation) -> None:
    entry = ops.gradient_registry._registry[operation.get_attr("_gradient_op_type").decode()]
    operation._tfdist_gradient = entry["type"]
    held, name = weakref.ref(entry["type"]), operation.name

    def gradient(operation, *gradients):
        function = held()
        if function is None:
            raise RuntimeError(
                f"The gradient of `{name}` is not available any more: its graph was freed. Keep a "
                "reference to that graph while a copy of it is differentiated."
            )
        return function(operation, *gradients)

    entry["type"] = gradient
