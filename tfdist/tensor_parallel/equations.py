"""The equations of EinsumDense layers: inputs, kernel and outputs, a label for each dim."""

from __future__ import annotations

import math

import keras
import tensorflow as tf
from keras import ops

from tfdist.graph.few_rows import matmul

__all__ = ["einsum", "equation_of_a", "position", "terms"]


def terms(equation: str) -> tuple[str, str, str]:
    """The labels of inputs, kernel and outputs."""
    left, outputs = equation.replace(" ", "").split("->")
    inputs, kernel = left.split(",")
    return inputs, kernel, outputs


def equation_of_a(equation: str) -> str | None:
    """From inputs and LoRA's A to what B is multiplied with; None where no equation says that.

    A's last dim is the rank in place of the kernel's last, and B makes the latter of it: so that is
    the last of the outputs.
    """
    inputs, kernel, outputs = terms(equation)
    if not outputs.endswith(kernel[-1]):
        return None
    rank = next(label for label in "rzyxwvu" if label not in equation)
    return f"{inputs},{kernel[:-1]}{rank}->{outputs[:-1]}{rank}"


def position(term: str, label: str) -> int:
    """Where a label stands, counted from the end that no ellipsis stands at."""
    if term.endswith("..."):
        return term.index(label)
    return term.index(label) - len(term)


def einsum(equation: str, inputs, kernel) -> tf.Tensor:
    """`ops.einsum(equation, inputs, kernel)`, where it can be as one product of two matrices.

    Keras multiplies inputs of more dims batch by batch, reading the kernel for each, and sums the
    kernel's gradient over batches afterwards.

    Args:
        equation: Of an `EinsumDense`.
        inputs: A tensor.
        kernel: A tensor.
    """
    of_inputs, of_kernel, of_outputs = terms(equation)
    inputs, kernel = tf.convert_to_tensor(inputs), tf.convert_to_tensor(kernel)
    summed = len([label for label in of_kernel if label in of_inputs])
    rows, columns = of_inputs[:-summed], of_kernel[summed:]
    as_matrices = (
        summed > 0
        and of_inputs == rows + of_kernel[:summed]
        and of_outputs == rows + columns
        and inputs.dtype.is_floating
        and kernel.dtype.is_floating
        and None not in inputs.shape[len(rows) :]
    )
    if not as_matrices or "." in equation or inputs.shape[len(rows) :] != kernel.shape[:summed]:
        return tf.convert_to_tensor(ops.einsum(equation, inputs, kernel))
    dtype = keras.backend.result_type(inputs.dtype, kernel.dtype)
    size = math.prod(kernel.shape[:summed])
    left = tf.reshape(tf.cast(inputs, dtype), [-1, size])
    right = tf.reshape(tf.cast(kernel, dtype), [size, math.prod(kernel.shape[summed:])])
    shape = tf.concat([tf.shape(inputs)[: len(rows)], tf.shape(kernel)[summed:]], axis=0)
    outputs = tf.reshape(matmul(left, right), shape)
    return tf.ensure_shape(outputs, [*inputs.shape[: len(rows)], *kernel.shape[summed:]])
