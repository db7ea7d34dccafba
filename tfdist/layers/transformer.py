"""The feed-forward part of a transformer block, and the block."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist import checks
from tfdist.collectives.mappings import column_parallel_matmul, linear
from tfdist.layers.activations import gelu
from tfdist.layers.attention import ParallelMultiHeadAttention
from tfdist.layers.context_parallel import KINDS
from tfdist.layers.dense import RowParallelDense, check_divides
from tfdist.layers.dropout import Dropout
from tfdist.layers.initializers import again, initializer
from tfdist.layers.normalization import LayerNormalization
from tfdist.sharding.weights import add_split_weight, tensor_group, value_tensor

__all__ = ["ParallelMLP", "TransformerDecoderBlock"]

_ACTIVATIONS = ("gelu", "swiglu")


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
        self.activation = checks.one_of("activation", activation, _ACTIVATIONS)
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
                    self._group,
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
                        self._group,
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


@keras.saving.register_keras_serializable(package="tfdist")
class TransformerDecoderBlock(keras.layers.Layer):
    """A pre-norm decoder block: x + attention(norm(x)), then x + mlp(norm(x)).

    Per tensor group it takes two sums forward and two backward, as in Megatron-LM; with
    `sequence_parallel` a gather and a reduce-scatter in the place of each.

    Args:
        num_heads: The global number of query heads; it divides the width.
        hidden_dim: The global number of hidden units of the feed-forward part.
        num_key_value_heads: The global number of key/value heads; None for `num_heads`.
        activation: "gelu" or "swiglu".
        dropout: The share of activations that is dropped, in the attention and after each part.
        attention_dropout: The share in the attention; None for `dropout`.
        use_bias: Whether products have a bias.
        rotary_base: None, or the base of rotary position embeddings.
        epsilon: Of the normalizations.
        sequence_parallel: Whether input and output are this tensor rank's slice of dim 1.
        context_attention: As for `ParallelMultiHeadAttention`.
        initializer_stddev: Kernels are drawn from a normal distribution of this width.
        output_stddev: Those that add to the residual stream from one of this; None for the same.
        **kwargs: As for `keras.layers.Layer`.
    """

    splits_tokens = True

    def __init__(
        self,
        num_heads: int,
        hidden_dim: int,
        *,
        num_key_value_heads: int | None = None,
        activation: str = "gelu",
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        use_bias: bool = True,
        rotary_base: float | None = None,
        epsilon: float = 1e-5,
        sequence_parallel: bool = False,
        context_attention: str = "ring",
        initializer_stddev: float = 0.02,
        output_stddev: float | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self._config: dict[str, Any] = {
            "num_heads": checks.integer("num_heads", num_heads, minimum=1),
            "hidden_dim": checks.integer("hidden_dim", hidden_dim, minimum=1),
            "num_key_value_heads": checks.integer(
                "num_key_value_heads", num_key_value_heads, minimum=1, optional=True
            ),
            "activation": checks.one_of("activation", activation, _ACTIVATIONS),
            "dropout": checks.number("dropout", dropout, minimum=0, maximum=1),
            "attention_dropout": checks.number(
                "attention_dropout", attention_dropout, minimum=0, maximum=1, optional=True
            ),
            "use_bias": checks.boolean("use_bias", use_bias),
            "rotary_base": checks.number("rotary_base", rotary_base, above=0, optional=True),
            "epsilon": checks.number("epsilon", epsilon, minimum=0),
            "sequence_parallel": checks.boolean("sequence_parallel", sequence_parallel),
            "context_attention": checks.one_of("context_attention", context_attention, KINDS),
            "initializer_stddev": checks.number(
                "initializer_stddev", initializer_stddev, minimum=0
            ),
            "output_stddev": checks.number(
                "output_stddev", output_stddev, minimum=0, optional=True
            ),
        }

    def build(self, input_shape):
        """Builds the parts."""
        config = self._config
        width = input_shape[-1]
        if width % config["num_heads"]:
            raise ValueError(
                f"num_heads divides the width. Received: width={width}, "
                f"num_heads={config['num_heads']} in `{self.name}`."
            )
        split = config["sequence_parallel"]
        policy = {"dtype": self.dtype_policy}
        products = {
            "use_bias": config["use_bias"],
            "sequence_parallel": split,
            **policy,
        }

        def normal(stddev):
            return keras.initializers.RandomNormal(stddev=stddev)

        def initializers():
            inner, outer = config["initializer_stddev"], config["output_stddev"]
            return {
                "kernel_initializer": normal(inner),
                "output_initializer": normal(inner if outer is None else outer),
            }

        def norm(name):
            return LayerNormalization(
                epsilon=config["epsilon"], sequence_parallel=split, name=name, **policy
            )

        of_attention = config["attention_dropout"]
        self.attention_norm = norm("attention_norm")
        self.attention = ParallelMultiHeadAttention(
            config["num_heads"],
            width // config["num_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            causal=True,
            dropout=config["dropout"] if of_attention is None else of_attention,
            rotary_base=config["rotary_base"],
            context_attention=config["context_attention"],
            name="attention",
            **products,
            **initializers(),
        )
        self.mlp_norm = norm("mlp_norm")
        self.mlp = ParallelMLP(
            config["hidden_dim"],
            activation=config["activation"],
            name="mlp",
            **products,
            **initializers(),
        )
        self.dropout = Dropout(config["dropout"], split=split, name="dropout", **policy)
        for part in (self.attention_norm, self.attention, self.mlp_norm, self.mlp):
            part.build(input_shape)
        self.built = True

    def call(self, inputs, training=None):
        """[batch, time, width] to the same shape."""
        x = self.attention(self.attention_norm(inputs), training=training)
        x = inputs + self.dropout(x, training=training)
        y = self.mlp(self.mlp_norm(x))
        return x + self.dropout(y, training=training)

    def compute_output_shape(self, input_shape):
        """That of the input."""
        return input_shape

    def get_config(self):
        """The configuration, the same on any mesh."""
        return {**super().get_config(), **self._config}
