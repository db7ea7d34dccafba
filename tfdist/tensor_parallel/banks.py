"""KerasHub's banks of experts: their weights and their computation."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist.experts.products import grouped_linear
from tfdist.sharding.weights import value_tensor


class Bank:
    """A bank of experts.

    It is called with rows in the order of experts and the number of rows of each, and returns a row each.

    Args:
        layer: KerasHub's layer.

    Attributes:
        weights: The attributes of the layer's variables, which are split along dim 0.
    """

    weights: tuple[str, ...]

    def __init__(self, layer: keras.layers.Layer):
        self.layer = layer
        self.num_experts: int = layer.num_experts
        self.width: int = layer.hidden_dim

    @property
    def variables(self) -> list[keras.Variable]:
        """The experts' weights."""
        return [getattr(self.layer, name) for name in self.weights]

    def _values(self) -> list[tf.Tensor]:
        return [tf.cast(value_tensor(v), self.layer.compute_dtype) for v in self.variables]

    def __call__(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Runs the experts of this rank."""
        raise NotImplementedError


class _Mixtral(Bank):
    weights = (
        "_expert_feedforward_gate_dense",
        "_expert_feedforward_intermediate_dense",
        "_expert_feedforward_output_dense",
    )

    def __call__(self, rows, counts):
        gate, up, output = self._values()
        gated = _in_float32(self.layer.activation, grouped_linear(rows, gate, counts))
        return grouped_linear(grouped_linear(rows, up, counts) * gated, output, counts)


class _Qwen(Bank):
    weights = ("_expert_feedforward_gate_dense", "_expert_feedforward_output_dense")

    def __call__(self, rows, counts):
        both, output = self._values()
        gate, up = tf.split(grouped_linear(rows, both, counts), 2, axis=-1)
        return grouped_linear(up * self._activation(gate), output, counts)

    def _activation(self, gate):
        return self.layer.activation(gate)


class _Qwen35(_Qwen):
    def _activation(self, gate):
        return _in_float32(tf.nn.silu, gate)


class _GptOss(Bank):
    weights = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")

    def __call__(self, rows, counts):
        both, both_bias, down, down_bias = self._values()
        limit = self.layer.limit
        made = grouped_linear(rows, both, counts, both_bias)
        gate = tf.minimum(made[:, ::2], tf.cast(limit, made.dtype))
        up = tf.clip_by_value(made[:, 1::2], -limit, limit)
        hidden = (up + 1) * gate * tf.sigmoid(gate * self.layer.alpha)
        return grouped_linear(hidden, down, counts, down_bias)


class _Gemma4(Bank):
    weights = ("gate_proj", "up_proj", "down_proj", "per_expert_scale")

    def __call__(self, rows, counts):
        gate, up, down, scale = self._values()
        gated = _in_float32(
            lambda x: tf.nn.gelu(x, approximate=True), grouped_linear(rows, gate, counts)
        )
        made = grouped_linear(gated * grouped_linear(rows, up, counts), down, counts)
        return made * tf.repeat(scale, counts)[:, None]


def _in_float32(function: Callable, x: tf.Tensor) -> tf.Tensor:
    return tf.cast(function(tf.cast(x, tf.float32)), x.dtype)


#: By the class of KerasHub's bank, the class that computes it.
BANKS: dict[str, type[Bank]] = {
    "MixtralMoeExperts": _Mixtral,
    "QwenMoeExperts": _Qwen,
    "Qwen3MoeExperts": _Qwen,
    "Qwen3_5MoeExperts": _Qwen35,
    "GptOssExperts": _GptOss,
    "Gemma4MoEBlock": _Gemma4,
}
