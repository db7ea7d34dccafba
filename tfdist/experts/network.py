"""The experts' networks: this rank's weights, and the computation of rows."""

from __future__ import annotations

import math

import keras
import tensorflow as tf

from tfdist.collectives import Group
from tfdist.experts.products import grouped_linear
from tfdist.layers.activations import gelu
from tfdist.layers.initializers import again
from tfdist.sharding.experts import expert_part
from tfdist.sharding.layout import global_shape, update_layout
from tfdist.sharding.weights import add_weight_part, tensor_group, value_tensor


class ExpertNetworks:
    """For each of a layer's experts, two products with a nonlinearity between.

    Args:
        layer: A layer with the arguments of `MixtureOfExperts` as attributes.
        activation: As for `MixtureOfExperts`.

    Raises:
        ValueError: The activation is unknown.
    """

    def __init__(self, layer, activation: str):
        self._sizes = (layer.num_experts, layer.hidden_dim)
        self._is_gated = activation == "swiglu"
        self._activation = _activation(activation)
        self._use_bias = layer.use_bias
        first = layer.kernel_initializer
        self._initializers = (first, layer.output_initializer or again(first))
        self._tensor: Group | None = None
        self._products: list[tuple] = []

    def add_weights(self, layer: keras.layers.Layer, width: int) -> None:
        """Adds this rank's part of the weights to a layer.

        Args:
            layer: The layer.
            width: The size of a token.
        """
        self._tensor, self._products = tensor_group(), []
        experts, hidden = self._sizes
        first, second = self._initializers

        def add(name, shape, unit_dim, initializer):
            part = expert_part(shape, unit_dim)
            return add_weight_part(layer, shape, part, name=name, initializer=initializer)

        def add_product(name, inputs, outputs, unit_dim, draw):
            shape, draw = (experts, inputs, outputs), OfEachExpert(draw, experts)
            kernel, bias = add(f"{name}_kernel", shape, unit_dim, draw), None
            if self._use_bias:
                unit_dim = 1 if unit_dim == 2 else None
                bias = add(f"{name}_bias", (experts, outputs), unit_dim, "zeros")
            self._products.append((kernel, bias))
            return bias

        for number, part in enumerate(("gate", "up") if self._is_gated else ("hidden",)):
            add_product(part, width, hidden, 2, first if number == 0 else again(first))
        output_bias = add_product("output", hidden, width, 1, second)
        if output_bias is not None and self._tensor is not None:
            update_layout(output_bias, partial_over=self._tensor)

    @property
    def num_parameters(self) -> int:
        """The number of parameters of all experts together."""
        weights = [weight for weight in tf.nest.flatten(self._products) if weight is not None]
        return sum(math.prod(global_shape(weight)) for weight in weights)

    def __call__(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Computes this rank's experts; if hidden units are split, the ranks' results must be summed.

        Args:
            rows: [rows, width], in the order of experts.
            counts: The number of rows of each expert: int32.

        Returns:
            [rows, width].
        """
        *first, (output_kernel, output_bias) = [
            (value_tensor(kernel), None if bias is None else value_tensor(bias))
            for kernel, bias in self._products
        ]
        made = [grouped_linear(rows, kernel, counts, bias) for kernel, bias in first]
        hidden = self._activation(made[0])
        if self._is_gated:
            hidden = hidden * made[1]
        if output_bias is not None and self._tensor is not None:
            # The sum over ranks must contain it once.
            output_bias = output_bias * (1.0 if self._tensor.rank == 0 else 0.0)
        return grouped_linear(hidden, output_kernel, counts, output_bias)


def _activation(name: str):
    """The function between the products; for SwiGLU, that of the gate."""
    if name in ("swiglu", "gelu"):
        return tf.nn.silu if name == "swiglu" else gelu
    try:
        found = keras.activations.get(name)
    except ValueError:
        found = None
    if not callable(found):
        raise ValueError(
            'The `activation` of experts must be "swiglu", "gelu" or a name of keras.activations. '
            f"Received: {name!r}."
        )
    return found


class OfEachExpert:
    """An initializer of [experts, ...] that draws each expert's weights separately.

    Keras would count the dim of experts as part of a kernel's receptive field, and scale the values down.

    Args:
        initializer: For one expert's weights.
        num_experts: The number of experts.
    """

    def __init__(self, initializer, num_experts: int):
        self._each = [_of_expert(initializer, number) for number in range(num_experts)]

    def __call__(self, shape, dtype=None):
        """The weights of all experts."""
        return tf.stack([tf.convert_to_tensor(draw(shape[1:], dtype)) for draw in self._each])

    def read_slice(self, part, dtype=None):
        """A part of the weights, for which only the experts in it are drawn."""
        begin = part.origin[0]
        inner = part.levels[-1]
        number = part.local_shape[0]
        drawn = [draw(part.shape[1:], dtype) for draw in self._each[begin : begin + number]]
        own = tf.stack([tf.convert_to_tensor(each) for each in drawn])
        return own if inner.dim == 0 else inner.slice_of(own)


def _of_expert(initializer, number: int):
    """The initializer of an expert, with a different seed for each."""
    if not hasattr(initializer, "get_config"):
        return initializer
    config = initializer.get_config()
    seed = config.get("seed")
    if isinstance(seed, int):
        return type(initializer).from_config({**config, "seed": seed + number})
    return again(initializer)
