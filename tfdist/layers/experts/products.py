"""Products of rows with the kernels of their experts, one expert after the other, without padding."""

from __future__ import annotations

import tensorflow as tf

from tfdist.graph.custom_gradient import custom_gradient

__all__ = ["grouped_linear"]


def grouped_linear(
    rows: tf.Tensor, kernel: tf.Tensor, counts: tf.Tensor, bias: tf.Tensor | None = None
) -> tf.Tensor:
    """Each row times the kernel of its expert, plus its bias.

    Args:
        rows: [rows, inputs], in the order of experts.
        kernel: [num_experts, inputs, outputs].
        counts: How many rows each expert has: int32, [num_experts].
        bias: [num_experts, outputs], or None.

    Returns:
        [rows, outputs].
    """
    num_experts = kernel.shape[0]

    def parts_of(x):
        return [x] if num_experts == 1 else tf.split(x, counts, num=num_experts)

    @custom_gradient
    def multiply(rows, kernel, *biases):
        kernels = tf.unstack(kernel, num=num_experts)
        found = [tf.matmul(part, each) for part, each in zip(parts_of(rows), kernels, strict=True)]
        if biases:
            each_bias = tf.unstack(biases[0], num=num_experts)
            found = [tf.nn.bias_add(y, b) for y, b in zip(found, each_bias, strict=True)]

        def gradient(dy):
            parts = parts_of(dy)
            back = [
                tf.matmul(part, each, transpose_b=True)
                for part, each in zip(parts, tf.unstack(kernel, num=num_experts), strict=True)
            ]
            d_kernel = [
                tf.matmul(x, part, transpose_a=True)
                for x, part in zip(parts_of(rows), parts, strict=True)
            ]
            d_bias = [tf.stack([tf.reduce_sum(part, axis=0) for part in parts])] if biases else []
            return _joined(back), tf.stack(d_kernel), *d_bias

        return _joined(found), gradient

    return multiply(rows, kernel) if bias is None else multiply(rows, kernel, bias)


def _joined(parts: list) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)
