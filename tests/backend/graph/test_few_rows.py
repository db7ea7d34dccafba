"""Products of few rows and a matrix, beside TensorFlow's."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.backend import kernels
from tfdist.backend.graph import few_rows

pytestmark = pytest.mark.skipif(
    not kernels.has_kernels(),
    reason="The library is not built: `tfdist-install-horovod` builds it.",
)

#: Rows, what is summed over, and columns: odd ones, of less than a register, of several blocks.
SIZES = [
    (1, 1, 1),
    (3, 7, 5),
    (4, 768, 1536),
    (5, 9, 4101),
    (7, 30, 6),
    (8, 130, 1024),
    (2, 64, 0),
    (4, 0, 3),
]


def slopes(shape) -> np.ndarray:
    return np.cos(np.arange(np.prod(shape))).reshape(shape).astype("float32")


def product(rows, matrix, transposed: bool):
    """In a graph, where it can be seen that a matrix was transposed."""

    @tf.function
    def run(rows, matrix):
        with tf.GradientTape() as tape:
            tape.watch([rows, matrix])
            with kernels.enabling_kernels():
                y = few_rows.matmul(rows, tf.transpose(matrix) if transposed else matrix)
            loss = tf.reduce_sum(y * slopes(y.shape))
        return y, *tape.gradient(loss, [rows, matrix])

    kinds = [o.type for o in run.get_concrete_function(rows, matrix).graph.get_operations()]
    return run(rows, matrix), kinds


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_as_tensorflow(sizes, transposed):
    few, summed, columns = sizes
    random = np.random.default_rng(0)
    rows = random.normal(size=(few, summed)).astype("float32")
    matrix = random.normal(size=(summed, columns)).astype("float32")
    given = tf.constant(matrix.T if transposed else matrix)
    (y, *gradients), kinds = product(tf.constant(rows), given, transposed)
    assert kinds.count("TfdistFewRowsMatMul") == 1
    exact = rows.astype("float64") @ matrix
    slope = slopes(exact.shape)
    np.testing.assert_allclose(y, exact, rtol=0, atol=2e-6 * max(1, summed) ** 0.5)
    of_rows = slope @ matrix.T.astype("float64")
    of_matrix = rows.T.astype("float64") @ slope
    for found, right in zip(
        gradients, (of_rows, of_matrix.T if transposed else of_matrix), strict=True
    ):
        np.testing.assert_allclose(
            found, right, rtol=0, atol=1e-6 * max(1, np.abs(right).max(initial=0))
        )


def test_what_is_no_number_is_seen():
    rows = tf.constant([[1.0, np.nan], [np.inf, 0.0]])
    (y, *_), _ = product(rows, tf.eye(2), False)
    assert np.isnan(y[0]).all() and not np.isfinite(y[1]).any()


@pytest.mark.parametrize(
    ("rows", "dtype"), [(9, "float32"), (0, "float32"), (None, "float32"), (4, "bfloat16")]
)
def test_others_are_tensorflows(rows, dtype):
    with tf.Graph().as_default() as graph, kernels.enabling_kernels():
        few_rows.matmul(tf.compat.v1.placeholder(dtype, [rows, 3]), tf.zeros([3, 2], dtype))
    assert "TfdistFewRowsMatMul" not in {o.type for o in graph.get_operations()}


def test_only_a_plain_transposition_is_left_out():
    with tf.Graph().as_default() as graph, kernels.enabling_kernels():
        rows, matrix = tf.zeros([2, 3]), tf.zeros([3, 2])
        few_rows.matmul(rows, tf.transpose(matrix, [0, 1]))
    (found,) = [o for o in graph.get_operations() if o.type == "TfdistFewRowsMatMul"]
    assert not found.get_attr("transpose_matrix")


def test_outside_of_a_generation_it_is_tensorflows():
    with tf.Graph().as_default() as graph:
        few_rows.matmul(tf.zeros([2, 3]), tf.zeros([3, 2]))
    assert "TfdistFewRowsMatMul" not in {o.type for o in graph.get_operations()}


def test_shapes_that_do_not_match():
    op = kernels.kernels().tfdist_few_rows_mat_mul
    for transposed, matrix in ((False, [2, 5]), (True, [5, 2])):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[rows, n\] and \[n, columns\]"):
            op(rows=tf.zeros([2, 3]), matrix=tf.zeros(matrix), transpose_matrix=transposed)
    with pytest.raises(tf.errors.InvalidArgumentError, match="Received"):
        op(rows=tf.zeros([3]), matrix=tf.zeros([3, 3]))
