"""`tf.custom_gradient` whose functions live no longer than the graphs that they are part of."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.framework import ops


def custom_gradient(function: Callable) -> Callable:
    """As `tf.custom_gradient`.

    TensorFlow keeps the gradient of each call in a graph in a table of the process, by a name of its
    own, and with it all that it refers to: the graph would never be freed. Here the operation holds
    the gradient, and the table knows only where it is.

    The table (`ops.gradient_registry`) is TensorFlow's own; `tests/backend/graph/test_custom_gradient.py` fails where
    it moves.

    Args:
        function: From tensors to a pair of outputs and of a function from gradients of these to
            gradients of the tensors.
    """
    wrapped = tf.custom_gradient(function)

    # TensorFlow does not convert what is its own either.
    @tf.autograph.experimental.do_not_convert
    @functools.wraps(function)
    def call(*args, **kwargs):
        outputs = wrapped(*args, **kwargs)
        for output in tf.nest.flatten(outputs, expand_composites=True):
            if tf.is_symbolic_tensor(output) and output.op.type == "IdentityN":
                _hold(output.op)
                break
        return outputs

    return call


def _hold(operation: tf.Operation) -> None:
    name = operation.get_attr("_gradient_op_type").decode()
    entry = ops.gradient_registry._registry[name]
    gradient = entry["type"]
    operation._tfdist_gradient = gradient
    entry["type"] = _looked_up(weakref.ref(gradient), operation.name)


def _looked_up(held: weakref.ref, name: str) -> Callable:
    def gradient(operation, *gradients):
        function = held()
        if function is None:
            raise RuntimeError(
                f"The gradient of `{name}` went with the graph that it was made in. Keep that graph "
                "for as long as a copy of it is differentiated."
            )
        return function(operation, *gradients)

    return gradient
