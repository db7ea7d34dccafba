"""A transformer block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from tfdist.context_parallel import KINDS
from tfdist.experts import MixtureOfExperts
from tfdist.layers.attention import ParallelMultiHeadAttention
from tfdist.layers.dropout import Dropout
from tfdist.layers.feed_forward import ACTIVATIONS, ParallelMLP
from tfdist.layers.normalization import LayerNormalization, RMSNormalization
from tfdist.utils import checks

NORMALIZATIONS: dict[str, type[keras.layers.Layer]] = {
    "layer": LayerNormalization,
    "rms": RMSNormalization,
}


@keras.saving.register_keras_serializable(package="tfdist")
class TransformerDecoderBlock(keras.layers.Layer):
    """A pre-norm decoder block: x + attention(norm(x)), then x + mlp(norm(x)).

    Forward and backward each need two all-reduces per tensor group, as in Megatron-LM; with
    `sequence_parallel` each of them is replaced by an all-gather and a reduce-scatter.

    Args:
        num_heads: The global number of query heads.
        hidden_dim: The global number of hidden units of the feed-forward part.
        num_key_value_heads: The global number of key/value heads; None for `num_heads`.
        head_dim: The size of a head; None for the width / `num_heads`.
        activation: "gelu" or "swiglu".
        dropout: The fraction of activations that are dropped, in the attention and after each part.
        attention_dropout: The fraction in the attention; None for `dropout`.
        use_bias: Whether products have a bias.
        rotary_base: None, or the base of rotary position embeddings.
        normalization: "layer" or "rms".
        epsilon: The epsilon of the normalizations.
        sequence_parallel: Whether input and output are this tensor rank's slice of dim 1.
        context_attention: As for `ParallelMultiHeadAttention`.
        initializer_stddev: The standard deviation of the normal distribution of kernels.
        output_stddev: That of kernels that add to the residual stream; None for the same.
        num_experts: The number of networks of the feed-forward part, of which some process a token:
            see `MixtureOfExperts`. None for a single one for all tokens.
        experts: Other arguments of that layer, such as `top_k`.
        **kwargs: As for `keras.layers.Layer`.
    """

    splits_tokens = True

    def __init__(
        self,
        num_heads: int,
        hidden_dim: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        activation: str = "gelu",
        dropout: float = 0.0,
        attention_dropout: float | None = None,
        use_bias: bool = True,
        rotary_base: float | None = None,
        normalization: str = "layer",
        epsilon: float = 1e-5,
        sequence_parallel: bool = False,
        context_attention: str = "ring",
        initializer_stddev: float = 0.02,
        output_stddev: float | None = None,
        num_experts: int | None = None,
        experts: Mapping[str, Any] | None = None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        checks.instance("experts", experts, Mapping, "a dict of arguments", optional=True)
        if experts and num_experts is None:
            raise ValueError(
                "`experts` requires `num_experts`. Received: "
                f"experts={dict(experts)!r}, num_experts=None."
            )
        self._config: dict[str, Any] = {
            "num_heads": checks.integer("num_heads", num_heads, minimum=1),
            "hidden_dim": checks.integer("hidden_dim", hidden_dim, minimum=1),
            "num_key_value_heads": checks.integer(
                "num_key_value_heads", num_key_value_heads, minimum=1, optional=True
            ),
            "head_dim": checks.integer("head_dim", head_dim, minimum=1, optional=True),
            "activation": checks.one_of("activation", activation, ACTIVATIONS),
            "dropout": checks.number("dropout", dropout, minimum=0, maximum=1),
            "attention_dropout": checks.number(
                "attention_dropout", attention_dropout, minimum=0, maximum=1, optional=True
            ),
            "use_bias": checks.boolean("use_bias", use_bias),
            "rotary_base": checks.number("rotary_base", rotary_base, above=0, optional=True),
            "normalization": checks.one_of("normalization", normalization, NORMALIZATIONS),
            "epsilon": checks.number("epsilon", epsilon, minimum=0),
            "sequence_parallel": checks.boolean("sequence_parallel", sequence_parallel),
            "context_attention": checks.one_of("context_attention", context_attention, KINDS),
            "initializer_stddev": checks.number(
                "initializer_stddev", initializer_stddev, minimum=0
            ),
            "output_stddev": checks.number(
                "output_stddev", output_stddev, minimum=0, optional=True
            ),
            "num_experts": checks.integer("num_experts", num_experts, minimum=1, optional=True),
            "experts": None if experts is None else dict(experts),
        }

    def build(self, input_shape):
        """Builds the layers of the block."""
        config = self._config
        width = input_shape[-1]
        if config["head_dim"] is None and width % config["num_heads"]:
            raise ValueError(
                "The width must be divisible by `num_heads`, unless `head_dim` is given. Received: "
                f"width={width}, num_heads={config['num_heads']} in `{self.name}`."
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
            return NORMALIZATIONS[config["normalization"]](
                epsilon=config["epsilon"], sequence_parallel=split, name=name, **policy
            )

        of_attention = config["attention_dropout"]
        self.attention_norm = norm("attention_norm")
        self.attention = ParallelMultiHeadAttention(
            config["num_heads"],
            config["head_dim"] or width // config["num_heads"],
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
        feed_forward = {"activation": config["activation"], "name": "mlp"}
        if config["num_experts"] is None:
            self.mlp = ParallelMLP(
                config["hidden_dim"], **feed_forward, **products, **initializers()
            )
        else:
            self.mlp = MixtureOfExperts(
                config["num_experts"],
                config["hidden_dim"],
                router_initializer=normal(config["initializer_stddev"]),
                **feed_forward,
                **products,
                **initializers(),
                **(config["experts"] or {}),
            )
        self.dropout = Dropout(config["dropout"], split=split, name="dropout", **policy)
        for part in (self.attention_norm, self.attention, self.mlp_norm, self.mlp):
            part.build(input_shape)
        self.built = True

    def call(self, inputs, document_starts=None, training=None):
        """Maps [batch, time, width] to the same shape; for `document_starts` see the attention."""
        x = self.attention_norm(inputs)
        x = self.attention(x, document_starts=document_starts, training=training)
        x = inputs + self.dropout(x, training=training)
        x_norm = self.mlp_norm(x)
        is_mixture = self._config["num_experts"] is not None
        y = self.mlp(x_norm, training=training) if is_mixture else self.mlp(x_norm)
        return x + self.dropout(y, training=training)

    def compute_output_shape(self, input_shape):
        """The shape of the input."""
        return input_shape

    def get_config(self):
        """The configuration, which is the same on any mesh."""
        experts = self._config["experts"]
        config = {**self._config, "experts": None if experts is None else dict(experts)}
        return {**super().get_config(), **config}
