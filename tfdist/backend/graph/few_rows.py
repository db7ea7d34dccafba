"""Products of few rows and a matrix, as a model that generates computes them for each token."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.kernels import kernels, kernels_enabled

#: With more rows the products themselves take the time, at which oneDNN is better.
_MOST_ROWS = 8


def matmul(rows: tf.Tensor, matrix: tf.Tensor) -> tf.Tensor:
    """`tf.matmul` of [rows, n] and [n, columns].

    Of a few rows the time goes by how the matrix is read. TensorFlow's kernels on CPUs first pack it, at
    half the speed of memory; where the compiled library may be used, it reads the matrix once.
    """
    few = rows.shape.rank == 2 and rows.shape[0] is not None and 0 < rows.shape[0] <= _MOST_ROWS
    if not few or not rows.dtype == matrix.dtype == tf.float32 or not kernels_enabled():
        return tf.matmul(rows, matrix)
    before = _transposed_of(matrix)
    return _few_rows(rows, matrix) if before is None else _few_rows_of_transposed(rows, before)


def _transposed_of(matrix: tf.Tensor) -> tf.Tensor | None:
    """What was transposed to make a matrix, so that it need not be; None where nothing was."""
    while tf.is_symbolic_tensor(matrix) and matrix.op.type == "Identity":
        matrix = matrix.op.inputs[0]
    if not tf.is_symbolic_tensor(matrix) or matrix.op.type != "Transpose":
        return None
    before, order = matrix.op.inputs
    order = tf.get_static_value(order)
    return before if order is not None and list(order) == [1, 0] else None


@custom_gradient
def _few_rows(rows, matrix):
    def gradient(dy):
        return tf.matmul(dy, matrix, transpose_b=True), tf.matmul(rows, dy, transpose_a=True)

    return kernels().tfdist_few_rows_mat_mul(rows=rows, matrix=matrix), gradient


@custom_gradient
def _few_rows_of_transposed(rows, matrix):
    def gradient(dy):
        return tf.matmul(dy, matrix), tf.matmul(dy, rows, transpose_a=True)

    product = kernels().tfdist_few_rows_mat_mul(rows=rows, matrix=matrix, transpose_matrix=True)
    return product, gradient
