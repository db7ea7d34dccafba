"""Products of few rows and a matrix, as computed for each token in generation."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.kernels import kernels, kernels_enabled

#: With more rows the time is that of the arithmetic, for which oneDNN is faster.
_MOST_ROWS = 8


def matmul(rows: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
    """`tf.matmul` of [rows, n] and [n, columns].

    For few rows the time is that of reading the matrix. TensorFlow's CPU kernels first pack it, at half
    the speed of memory; the kernel of the compiled library, if it may be used, reads the matrix once.
    """
    few = rows.shape.rank == 2 and rows.shape[0] is not None and 0 < rows.shape[0] <= _MOST_ROWS
    if not few or not rows.dtype == matrix.dtype == tf.float32 or not kernels_enabled():
        return tf.matmul(rows, matrix)
    before = _untransposed(matrix)
    is_transposed = before is not None

    @custom_gradient
    def multiply(x, w):
        def gradient(dy):
            dw = (dy, x) if is_transposed else (x, dy)
            return tf.matmul(dy, w, transpose_b=not is_transposed), tf.matmul(*dw, transpose_a=True)

        multiplied = kernels().tfdist_few_rows_mat_mul
        return multiplied(rows=x, matrix=w, transpose_matrix=is_transposed), gradient

    return multiply(rows, before if is_transposed else matrix)


def _untransposed(matrix: tf.Tensor) -> tf.Tensor | None:
    """The tensor of which a matrix is the transpose, which then need not be computed; else None."""
    while tf.is_symbolic_tensor(matrix) and matrix.op.type == "Identity":
        matrix = matrix.op.inputs[0]
    if not tf.is_symbolic_tensor(matrix) or matrix.op.type != "Transpose":
        return None
    before, order = matrix.op.inputs
    order = tf.get_static_value(order)
    return before if order is not None and list(order) == [1, 0] else None
