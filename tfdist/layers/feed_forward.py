"""The feed-forward part of a transformer block."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.collectives.mappings import column_parallel_matmul, linear
from tfdist.layers.activations import gelu
from tfdist.layers.dense import RowParallelDense, check_divides
from tfdist.layers.initializers import again, initializer
from tfdist.sharding.weights import add_split_weight, tensor_group, value_tensor
from tfdist.utils import checks

ACTIVATIONS = ("gelu", "swiglu")


@keras.saving.register_keras_serializable(package="tfdist")
class ParallelMLP(keras.layers.Layer):
    """Two products with a nonlinearity between, the hidden units split over the tensor axis.

    `gelu` is the tanh approximation, as in GPT-2; `swiglu` multiplies a gate, through SiLU, with
    a second product (Shazeer 2020), both computed as one.

    Args:
        hidden_dim: The global number of hidden units; it divides by the tensor axis.
        activation: "gelu" or "swiglu".
        use_bias: Whether the products have a bias.
        sequence_parallel: Whether input and output are this tensor rank's slice of dim 1.
        kernel_initializer: Of the first product's kernels.
        output_initializer: Of the second's; None for the same.
        **kwargs: As for `keras.layers.Layer`.
    """

    splits_tokens = True

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
        super().__init__(**kwargs)
        self.hidden_dim = hidden_dim = checks.integer("hidden_dim", hidden_dim, minimum=1)
        self.activation = checks.one_of("activation", activation, ACTIVATIONS)
        self.use_bias = checks.boolean("use_bias", use_bias)
        self.sequence_parallel = checks.boolean("sequence_parallel", sequence_parallel)
        self.kernel_initializer = initializer("kernel_initializer", kernel_initializer)
        self.output_initializer = initializer(
            "output_initializer", output_initializer, optional=True
        )
        self._group = tensor_group()
        check_divides("hidden_dim", hidden_dim, self._group, self)

    def build(self, input_shape):
        """Adds this rank's share of the hidden units."""
        features = input_shape[-1]
        parts = ("gate", "up") if self.activation == "swiglu" else ("hidden",)
        self._kernels, self._biases = [], []
        for number, part in enumerate(parts):
            initializer = self.kernel_initializer if number == 0 else again(self.kernel_initializer)
            self._kernels.append(
                add_split_weight(
                    self,
                    (features, self.hidden_dim),
                    1,
                    axis=self._group,
                    name=f"{part}_kernel",
                    initializer=initializer,
                )
            )
            if self.use_bias:
                self._biases.append(
                    add_split_weight(
                        self,
                        (self.hidden_dim,),
                        0,
                        axis=self._group,
                        name=f"{part}_bias",
                        initializer="zeros",
                    )
                )
        self.output_dense = RowParallelDense(
            features,
            use_bias=self.use_bias,
            sequence_parallel=self.sequence_parallel,
            kernel_initializer=self.output_initializer or again(self.kernel_initializer),
            dtype=self.dtype_policy,
            name="mlp_output",
        )
        share = self.hidden_dim // (self._group.size if self._group else 1)
        self.output_dense.build((*input_shape[:-1], share))
        self.built = True

    def call(self, inputs):
        """[batch, time, features] to the same shape."""
        kernels = [value_tensor(kernel) for kernel in self._kernels]
        kernel = kernels[0] if len(kernels) == 1 else tf.concat(kernels, axis=1)
        biases = [value_tensor(bias) for bias in self._biases]
        bias = tf.concat(biases, axis=0) if biases else None
        if self._group is None:
            hidden = linear(inputs, kernel, bias)
        else:
            axis = 1 if self.sequence_parallel else None
            hidden = column_parallel_matmul(
                inputs, kernel, self._group, axis, bias=bias, name=self.name
            )
        if self.activation == "swiglu":
            gate, up = tf.split(hidden, 2, axis=-1)
            hidden = tf.nn.silu(gate) * up
        else:
            hidden = gelu(hidden)
        return self.output_dense(hidden)

    def compute_output_shape(self, input_shape):
        """That of the input."""
        return input_shape

    def get_config(self):
        """The configuration, the same on any mesh."""
        serialize = keras.initializers.serialize
        return {
            **super().get_config(),
            "hidden_dim": self.hidden_dim,
            "activation": self.activation,
            "use_bias": self.use_bias,
            "sequence_parallel": self.sequence_parallel,
            "kernel_initializer": serialize(self.kernel_initializer),
            "output_initializer": self.output_initializer and serialize(self.output_initializer),
        }
