"""Activations that need few passes over memory."""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.kernels import kernels, kernels_enabled

_RATE, _CUBIC = 1.5957691216057308, 0.044715  # 2 * sqrt(2 / pi)


def gelu(x):
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016), of any shape.

    0.5 (1 + tanh(u)) is the logistic function of 2 u, whose gradient is a function of its value. Only x is
    kept for the backward pass. In steps of tfdist's strategies on CPUs the compiled library computes it in
    one pass, if it is installed; the results differ by rounding.
    """
    return _one_pass(x) if x.dtype == tf.float32 and kernels_enabled() else _by_tensorflow(x)


@custom_gradient
def _one_pass(x):
    def gradient(dy):
        return kernels().tfdist_gelu_gradient(dy=dy, x=x)

    return kernels().tfdist_gelu(x=x), gradient


@custom_gradient
def _by_tensorflow(x):
    def gate_and_square():
        square = tf.square(x)
        return tf.sigmoid(x * (_RATE + _RATE * _CUBIC * square)), square

    def gradient(dy):
        gate, square = gate_and_square()
        slope = x * (_RATE + 3 * _RATE * _CUBIC * square)
        return dy * gate * (1 + slope * (1 - gate))

    return x * gate_and_square()[0], gradient
