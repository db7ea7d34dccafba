"""The feed-forward part of a transformer block."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.collectives.mappings import column_parallel_matmul, linear
from tfdist.layers.activations import gelu
from tfdist.layers.base import check_divides
from tfdist.layers.dense import TwoProducts
from tfdist.layers.initializers import again
from tfdist.sharding.weights import add_split_weight, value_tensor
from tfdist.utils import checks

ACTIVATIONS = ("gelu", "swiglu")


@keras.saving.register_keras_serializable(package="tfdist")
class ParallelMLP(TwoProducts):
    """Two products with a nonlinearity between, whose hidden units are split over the tensor axis.

    `gelu` is the tanh approximation, as in GPT-2; `swiglu` multiplies a gate, through SiLU, with
    a second product (Shazeer 2020), and both are computed as one.

    Args:
        hidden_dim: The global number of hidden units, a multiple of the size of the tensor axis.
        activation: "gelu" or "swiglu".
        use_bias: Whether the products have a bias.
        sequence_parallel: Whether input and output are this tensor rank's slice of dim 1.
        kernel_initializer: For the kernels of the first product.
        output_initializer: For that of the second product; None for the same.
        **kwargs: As for `keras.layers.Layer`.
    """

    _arguments = (*TwoProducts._arguments, "hidden_dim", "activation")

    def __init__(
        self,
        hidden_dim: int,
        *,
        activation: str = "gelu",
        use_bias: bool = True,
        sequence_parallel: bool = False,
        kernel_initializer="glorot_uniform",
        output_initializer=None,
        **kwargs,
    ):
        super().__init__(
            use_bias=use_bias,
            sequence_parallel=sequence_parallel,
            kernel_initializer=kernel_initializer,
            output_initializer=output_initializer,
            **kwargs,
        )
        self.hidden_dim = checks.integer("hidden_dim", hidden_dim, minimum=1)
        self.activation = checks.one_of("activation", activation, ACTIVATIONS)
        check_divides("hidden_dim", self.hidden_dim, self._group, self)

    def build(self, input_shape):
        """Adds this rank's share of the hidden units."""
        features = input_shape[-1]

        def add(name, shape, initializer):
            return add_split_weight(
                self, shape, len(shape) - 1, axis=self._group, name=name, initializer=initializer
            )

        self._kernels: list = []
        self._biases: list = []
        for part in ("gate", "up") if self.activation == "swiglu" else ("hidden",):
            first = self.kernel_initializer
            initializer = again(first) if self._kernels else first
            shape = (features, self.hidden_dim)
            self._kernels.append(add(f"{part}_kernel", shape, initializer))
            if self.use_bias:
                self._biases.append(add(f"{part}_bias", shape[1:], "zeros"))
        self.output_dense = self._output_product(features, "mlp_output")
        self.output_dense.build((*input_shape[:-1], self.hidden_dim // self._ranks))
        self.built = True

    def call(self, inputs):
        """Maps [batch, time, features] to the same shape."""
        kernels = [value_tensor(kernel) for kernel in self._kernels]
        kernel = kernels[0] if len(kernels) == 1 else tf.concat(kernels, axis=1)
        biases = [value_tensor(bias) for bias in self._biases]
        bias = tf.concat(biases, axis=0) if biases else None
        if self._group is None:
            hidden = linear(inputs, kernel, bias)
        else:
            hidden = column_parallel_matmul(
                inputs, kernel, self._group, self._sequence_axis, bias=bias, name=self.name
            )
        if self.activation == "swiglu":
            gate, up = tf.split(hidden, 2, axis=-1)
            hidden = tf.nn.silu(gate) * up
        else:
            hidden = gelu(hidden)
        return self.output_dense(hidden)
