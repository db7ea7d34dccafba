"""`keras.ops.matmul` and `keras.ops.einsum` for a layer's kernel, as one product of two matrices."""

from __future__ import annotations

import math

import keras
import tensorflow as tf
from keras import ops

from tfdist.backend.graph.few_rows import matmul as matmul_of_matrices
from tfdist.collectives.mappings import linear
from tfdist.tensor_parallel.equations import terms


def same_dtype(inputs, kernel) -> tuple:
    """Both in the dtype in which Keras multiplies them."""
    dtype = keras.backend.result_type(inputs.dtype, kernel.dtype)
    return tf.cast(inputs, dtype), tf.cast(kernel, dtype)


def matmul(inputs, kernel) -> tf.Tensor:
    """`ops.matmul(inputs, kernel)` of [..., n] and [n, columns]."""
    return linear(*same_dtype(inputs, kernel))


def einsum(equation: str, inputs, kernel) -> tf.Tensor:
    """`ops.einsum(equation, inputs, kernel)`, as one product of two matrices where possible.

    Keras multiplies inputs of more dims batch by batch, reading the kernel for each, and sums the
    kernel's gradient over batches afterwards.

    Args:
        equation: The equation of an `EinsumDense`.
        inputs: A tensor.
        kernel: A tensor.
    """
    of_inputs, of_kernel, of_outputs = terms(equation)
    inputs, kernel = tf.convert_to_tensor(inputs), tf.convert_to_tensor(kernel)
    summed = len([label for label in of_kernel if label in of_inputs])
    rows, columns = of_inputs[:-summed], of_kernel[summed:]
    as_matrices = (
        "." not in equation
        and summed > 0
        and of_inputs == rows + of_kernel[:summed]
        and of_outputs == rows + columns
        and inputs.dtype.is_floating
        and kernel.dtype.is_floating
        and None not in inputs.shape[len(rows) :]
        and inputs.shape[len(rows) :] == kernel.shape[:summed]
    )
    if not as_matrices:
        return tf.convert_to_tensor(ops.einsum(equation, inputs, kernel))
    left, right = same_dtype(inputs, kernel)
    size = math.prod(kernel.shape[:summed])
    left = tf.reshape(left, [-1, size])
    right = tf.reshape(right, [size, math.prod(kernel.shape[summed:])])
    shape = tf.concat([tf.shape(inputs)[: len(rows)], tf.shape(kernel)[summed:]], axis=0)
    outputs = tf.reshape(matmul_of_matrices(left, right), shape)
    return tf.ensure_shape(outputs, [*inputs.shape[: len(rows)], *kernel.shape[summed:]])
