"""Products of EinsumDense layers as products of two matrices."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.tensor_parallel.products import einsum

#: Equations, each with the shapes of inputs and kernel, and whether it is one product of matrices.
EQUATIONS = [
    ("abc,cde->abde", (2, 3, 4), (4, 5, 6), True),
    ("abcd,cde->abe", (2, 3, 4, 5), (4, 5, 6), True),
    ("ab,bc->ac", (3, 4), (4, 1), True),
    ("a b c, c d -> a b d", (1, 3, 4), (4, 5), True),
    ("abcd,cd->ab", (2, 3, 4, 5), (4, 5), True),
    ("btd,ndh->btnh", (2, 3, 4), (5, 4, 6), False),
    ("bqm,muh->bquh", (2, 3, 4), (4, 5, 6), True),
    ("abc,cd->adb", (2, 3, 4), (4, 5), False),
    ("abc,dc->abd", (2, 3, 4), (5, 4), False),
    ("abc,bcd->abcd", (2, 3, 4), (3, 4, 5), False),
    ("...c,cd->...d", (2, 3, 4), (4, 5), False),
]


@pytest.mark.parametrize(("equation", "rows", "kernel", "matrices"), EQUATIONS)
@pytest.mark.parametrize("batch", ["known", "unknown"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32")])
def test_as_keras(equation, rows, kernel, matrices, batch, dtypes):
    random = np.random.default_rng(0)
    x = tf.cast(random.normal(size=rows), dtypes[0])
    w = tf.cast(random.normal(size=kernel), dtypes[1])
    spec = tf.TensorSpec(rows if batch == "known" else (None, *rows[1:]), x.dtype)

    def gradients(product):
        @tf.function(input_signature=[spec])
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch([x, w])
                y = product(equation, x, w)
                loss = tf.reduce_sum(tf.sin(tf.cast(y, tf.float32)))
            return y, *tape.gradient(loss, [x, w])

        return run

    ours = gradients(einsum)
    for found, right in zip(ours(x), gradients(keras.ops.einsum)(x), strict=True):
        assert found.dtype == right.dtype
        np.testing.assert_allclose(
            *(np.asarray(t, "float32") for t in (found, right)), rtol=2e-5, atol=2e-5
        )
    forward = tf.function(lambda x: einsum(equation, x, w), input_signature=[spec])
    kinds = [operation.type for operation in forward.get_concrete_function().graph.get_operations()]
    assert (kinds.count("MatMul") == 1) == (matrices or equation == "ab,bc->ac")


def test_no_rows():
    found = einsum("abc,cde->abde", tf.zeros([0, 3, 4]), tf.zeros([4, 5, 6]))
    assert found.shape == (0, 3, 5, 6)


@pytest.mark.parametrize("equation", ["abc,cde->abde", "ab,bc->ac"])
def test_sizes_that_do_not_match(equation):
    inputs, kernel = ((2, 3, 4), (5, 6, 7)) if "e" in equation else ((2, 4), (5, 6))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
        einsum(equation, tf.zeros(inputs), tf.zeros(kernel))
