"""GPT: a decoder-only transformer language model, for one device and for any mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import keras

from tfdist import layers
from tfdist.context_parallel import KINDS
from tfdist.models.transformer import NORMALIZATIONS, TransformerDecoderBlock
from tfdist.utils import checks


def gpt(
    vocabulary_size: int,
    *,
    num_layers: int = 4,
    width: int = 256,
    num_heads: int = 4,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    hidden_dim: int | None = None,
    max_length: int = 128,
    activation: str = "gelu",
    positions: str = "learned",
    tied_head: bool = True,
    dropout: float = 0.0,
    attention_dropout: float | None = None,
    use_bias: bool = True,
    normalization: str = "layer",
    sequence_parallel: bool = False,
    num_experts: int | None = None,
    top_k: int = 2,
    experts: Mapping[str, Any] | None = None,
    context_attention: str = "ring",
    documents: bool = False,
    name: str = "gpt",
) -> keras.Model:
    """Returns a decoder like GPT-2: from token ids to logits of the next token.

    It has pre-norm blocks. Weights are drawn with a standard deviation of 0.02, those that add to the
    residual stream with 0.02 / sqrt(2 * num_layers). Under a strategy with a tensor axis every
    block splits its heads and hidden units over it, and embedding and head split the vocabulary.

    Args:
        vocabulary_size: The number of tokens.
        num_layers: The number of blocks.
        width: The size of the residual stream.
        num_heads: The number of query heads of a block.
        num_key_value_heads: The number of key/value heads; None for `num_heads`.
        head_dim: The size of a head; None for width / num_heads.
        hidden_dim: The number of hidden units of a block; None for 4 * width.
        max_length: The longest sequence, in tokens.
        activation: The activation of the feed-forward parts: "gelu" or "swiglu".
        positions: "learned" or "rotary".
        tied_head: Whether the head is the embedding, transposed.
        dropout: The fraction of activations that are dropped.
        attention_dropout: The fraction of attention weights that are dropped; None for `dropout`.
        use_bias: Whether products have a bias.
        normalization: "layer" or "rms".
        sequence_parallel: Whether normalizations and dropout run on a slice of the sequence on
            each tensor rank; the sequence must be divisible by the size of the tensor axis.
        num_experts: The number of networks in each feed-forward part, split over the expert axis: see
            `tfdist.experts.MixtureOfExperts`. None for a single one for all tokens.
        top_k: The number of experts that process a token.
        experts: Other arguments of that layer, such as `{"balance_over": "sequence"}`.
        context_attention: How attention spans the ranks of a context axis: "ring", "all_gather" or
            "ulysses"; see `tfdist.layers.ParallelMultiHeadAttention`.
        documents: Whether a row has several documents, which do not see each other. The model then has a
            second input, `document_starts`: int32 [batch, time], the place in the row of the first token of
            each token's document.
        name: The model's name.

    Returns:
        A model from int32 ids of shape [batch, time] to logits [batch, time, vocabulary_size]; with
        `documents`, from a dict of `tokens` and `document_starts`.

    Raises:
        ValueError: Sizes do not match, or are not divisible by the size of the tensor axis.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """
    vocabulary_size = checks.integer("vocabulary_size", vocabulary_size, minimum=1)
    num_layers = checks.integer("num_layers", num_layers, minimum=1)
    width = checks.integer("width", width, minimum=1)
    num_heads = checks.integer("num_heads", num_heads, minimum=1)
    checks.integer("num_key_value_heads", num_key_value_heads, minimum=1, optional=True)
    checks.integer("head_dim", head_dim, minimum=1, optional=True)
    checks.integer("hidden_dim", hidden_dim, minimum=1, optional=True)
    max_length = checks.integer("max_length", max_length, minimum=1)
    checks.one_of("activation", activation, ("gelu", "swiglu"))
    checks.one_of("positions", positions, ("learned", "rotary"))
    checks.boolean("tied_head", tied_head)
    checks.number("dropout", dropout, minimum=0, maximum=1)
    checks.number("attention_dropout", attention_dropout, minimum=0, maximum=1, optional=True)
    checks.boolean("use_bias", use_bias)
    checks.one_of("normalization", normalization, NORMALIZATIONS)
    checks.boolean("sequence_parallel", sequence_parallel)
    checks.integer("num_experts", num_experts, minimum=1, optional=True)
    top_k = checks.integer("top_k", top_k, minimum=1)
    checks.instance("experts", experts, Mapping, "a dict of arguments", optional=True)
    checks.one_of("context_attention", context_attention, KINDS)
    checks.boolean("documents", documents)
    checks.text("name", name)
    of_experts = experts if num_experts is None else {"top_k": top_k, **(experts or {})}
    stddev = 0.02

    def normal(width=stddev):
        return keras.initializers.RandomNormal(stddev=width)

    length = (max_length if sequence_parallel else None,)
    tokens = keras.Input(length, dtype="int32", name="tokens")
    inputs, starts = tokens, {}
    if documents:
        starts = {"document_starts": keras.Input(length, dtype="int32", name="document_starts")}
        inputs = {"tokens": tokens, **starts}
    embedding = layers.VocabParallelEmbedding(
        vocabulary_size,
        width,
        embeddings_initializer=normal(),
        sequence_parallel=sequence_parallel,
        name="token_embedding",
    )
    x = embedding(tokens)
    if positions == "learned":
        x = layers.PositionEmbedding(
            max_length,
            initializer=normal(),
            sequence_parallel=sequence_parallel,
            name="position_embedding",
        )(x, **starts)
    x = layers.Dropout(dropout, split=sequence_parallel, name="embedding_dropout")(x)
    for number in range(num_layers):
        x = TransformerDecoderBlock(
            num_heads,
            hidden_dim or 4 * width,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            activation=activation,
            dropout=dropout,
            attention_dropout=attention_dropout,
            use_bias=use_bias,
            rotary_base=10_000.0 if positions == "rotary" else None,
            normalization=normalization,
            sequence_parallel=sequence_parallel,
            context_attention=context_attention,
            initializer_stddev=stddev,
            output_stddev=stddev / math.sqrt(2 * num_layers),
            num_experts=num_experts,
            experts=of_experts,
            name=f"block_{number}",
        )(x, **starts)
    x = NORMALIZATIONS[normalization](
        epsilon=1e-5, sequence_parallel=sequence_parallel, name="final_norm"
    )(x)
    if tied_head:
        logits = embedding(x, reverse=True)
    else:
        logits = layers.VocabParallelHead(
            vocabulary_size,
            sequence_parallel=sequence_parallel,
            kernel_initializer=normal(),
            name="head",
        )(x)
    return keras.Model(inputs, logits, name=name)
