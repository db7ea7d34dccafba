"""The experts' networks: what they hold on a rank, and what they make of rows."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfdist.collectives import Group
from tfdist.experts.initializers import OfEachExpert
from tfdist.experts.products import grouped_linear
from tfdist.layers.activations import gelu
from tfdist.layers.initializers import again
from tfdist.sharding.experts import expert_part
from tfdist.sharding.layout import update_layout
from tfdist.sharding.weights import add_weight_part, tensor_group, value_tensor


class ExpertNetworks:
    """Two products with a nonlinearity between, for each of a layer's experts.

    Args:
        num_experts: The global number of experts.
        hidden_dim: The global number of hidden units of each.
        activation: As for `MixtureOfExperts`.
        use_bias: Whether the products have a bias.
        kernel_initializer: Of the first product's kernels.
        output_initializer: Of the second's; None for the same.

    Raises:
        ValueError: The activation is unknown.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_dim: int,
        activation: str,
        use_bias: bool,
        kernel_initializer,
        output_initializer,
    ):
        self._sizes = (num_experts, hidden_dim)
        self._is_gated = activation == "swiglu"
        self._activation = _activation(activation)
        self._use_bias = use_bias
        self._initializers = (kernel_initializer, output_initializer or again(kernel_initializer))
        self._tensor: Group | None = None
        self._width = 0

    def add_weights(self, layer: keras.layers.Layer, width: int) -> None:
        """Adds this rank's part of the weights to a layer.

        Args:
            layer: The layer.
            width: The size of a token.
        """
        self._tensor, self._width = tensor_group(), width
        experts, hidden = self._sizes
        first, second = self._initializers

        def add(name, shape, unit_dim, initializer):
            if initializer != "zeros":
                initializer = OfEachExpert(initializer, experts)
            part = expert_part(shape, unit_dim)
            return add_weight_part(layer, shape, part, name=name, initializer=initializer)

        self._kernels, self._biases = [], []
        for number, part in enumerate(("gate", "up") if self._is_gated else ("hidden",)):
            draw = first if number == 0 else again(first)
            self._kernels.append(add(f"{part}_kernel", (experts, width, hidden), 2, draw))
            if self._use_bias:
                self._biases.append(add(f"{part}_bias", (experts, hidden), 1, "zeros"))
        self._output_kernel = add("output_kernel", (experts, hidden, width), 1, second)
        self._output_bias = None
        if self._use_bias:
            self._output_bias = add("output_bias", (experts, width), None, "zeros")
            if self._tensor is not None:
                update_layout(self._output_bias, partial_over=self._tensor)

    @property
    def num_parameters(self) -> int:
        """The number of parameters of all experts together."""
        experts, hidden = self._sizes
        products = (len(self._kernels) + 1) * hidden * self._width
        biases = len(self._biases) * hidden + self._width if self._use_bias else 0
        return experts * (products + biases)

    def __call__(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Runs this rank's experts; where hidden units are split, the ranks' results are to be summed.

        Args:
            rows: [rows, width], in the order of experts.
            counts: How many rows each expert has: int32.

        Returns:
            [rows, width].
        """
        biases = self._biases or [None] * len(self._kernels)
        made = [
            grouped_linear(
                rows, value_tensor(kernel), counts, None if bias is None else value_tensor(bias)
            )
            for kernel, bias in zip(self._kernels, biases, strict=True)
        ]
        hidden = self._activation(made[0])
        if self._is_gated:
            hidden = hidden * made[1]
        bias = None if self._output_bias is None else value_tensor(self._output_bias)
        if bias is not None and self._tensor is not None:
            # It counts once in the sum.
            bias = bias * (1.0 if self._tensor.rank == 0 else 0.0)
        return grouped_linear(hidden, value_tensor(self._output_kernel), counts, bias)


def _activation(name: str):
    """What stands between the products; the part of the gate in SwiGLU."""
    if name in ("swiglu", "gelu"):
        return tf.nn.silu if name == "swiglu" else gelu
    try:
        found = keras.activations.get(name)
    except ValueError:
        found = None
    if not callable(found):
        raise ValueError(
            'The `activation` of experts is "swiglu", "gelu" or a name of keras.activations. '
            f"Received: {name!r}."
        )
    return found
