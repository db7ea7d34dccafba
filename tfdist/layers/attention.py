"""Self-attention with the heads split over the tensor axis."""

from __future__ import annotations

import math

import keras
import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.context_parallel import KINDS, check_attention, check_whole_slices, context_attention
from tfdist.context_parallel.blockwise import blockwise_attention
from tfdist.layers.dense import ColumnParallelDense, RowParallelDense, check_divides
from tfdist.layers.dropout import Dropout
from tfdist.layers.initializers import again, initializer
from tfdist.sharding.weights import tensor_group, token_group
from tfdist.step.context import current_tokens
from tfdist.utils import checks

#: From this length on attention goes block by block, which is faster then, and takes less memory.
_LONG = 1024


@keras.saving.register_keras_serializable(package="tfdist")
class ParallelMultiHeadAttention(keras.layers.Layer):
    """Self-attention of which each tensor rank computes its share of the heads.

    Queries, keys and values come from one product (fused QKV), split by columns; the projection
    of the heads' outputs is split by rows. With fewer key/value heads than query heads this is
    grouped-query attention (Ainslie et al. 2023); the unit that is split is a key/value head and
    its queries.

    Sequences of 1,024 tokens and more are attended to block by block (see `blockwise_attention`), where
    their length is known and no attention weights are dropped.

    On a context axis, where each rank has other tokens, queries attend to the tokens of all ranks.
    `context_attention` says how keys and values get there:

    - "ring": they go from rank to rank, while each computes with those it has (Liu et al. 2023).
    - "all_gather": each rank gets all of them before it begins (Llama team 2024).
    - "ulysses": each rank gets all tokens of an equal part of the heads (Jacobs et al. 2023).

    The columns of the fused kernel stand by key/value head: its queries, its key, its value.

    Args:
        num_heads: The global number of query heads.
        key_dim: The size of a head.
        num_key_value_heads: The global number of key/value heads; None for `num_heads`.
        causal: Whether a position sees only itself and those before it.
        dropout: The share of attention weights that is dropped.
        use_bias: Whether both products have a bias.
        rotary_base: None, or the base of rotary position embeddings (Su et al. 2021): 10000.
        sequence_parallel: Whether input and output are this tensor rank's slice of dim 1.
        context_attention: "ring", "all_gather" or "ulysses"; of no meaning without a context axis.
        kernel_initializer: Of the fused kernel.
        output_initializer: Of the projection's kernel; None for the same.
        **kwargs: As for `keras.layers.Layer`.

    Raises:
        ValueError: The heads do not divide by the key/value heads, or these by the tensor axis; or the
            context axis cannot compute it so.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    splits_tokens = True

    def __init__(
        self,
        num_heads: int,
        key_dim: int,
        *,
        num_key_value_heads: int | None = None,
        causal: bool = False,
        dropout: float = 0.0,
        use_bias: bool = True,
        rotary_base: float | None = None,
        sequence_parallel: bool = False,
        context_attention: str = "ring",
        kernel_initializer="glorot_uniform",
        output_initializer=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_heads = num_heads = checks.integer("num_heads", num_heads, minimum=1)
        self.key_dim = key_dim = checks.integer("key_dim", key_dim, minimum=1)
        groups = checks.integer(
            "num_key_value_heads", num_key_value_heads, minimum=1, optional=True
        )
        self.num_key_value_heads = groups or num_heads
        self.causal = checks.boolean("causal", causal)
        self.dropout = checks.number("dropout", dropout, minimum=0, maximum=1)
        self.use_bias = checks.boolean("use_bias", use_bias)
        self.rotary_base = checks.number("rotary_base", rotary_base, above=0, optional=True)
        self.sequence_parallel = checks.boolean("sequence_parallel", sequence_parallel)
        self.context_attention = checks.one_of("context_attention", context_attention, KINDS)
        self.kernel_initializer = initializer("kernel_initializer", kernel_initializer)
        self.output_initializer = initializer(
            "output_initializer", output_initializer, optional=True
        )
        group = tensor_group()
        if num_heads % self.num_key_value_heads:
            raise ValueError(
                "num_heads divides by num_key_value_heads. Received: "
                f"num_heads={num_heads}, num_key_value_heads={num_key_value_heads}."
            )
        what = "num_heads" if self.num_key_value_heads == num_heads else "num_key_value_heads"
        check_divides(what, self.num_key_value_heads, group, self)
        if rotary_base is not None and key_dim % 2:
            raise ValueError(f"Rotary positions want an even key_dim. Received: {key_dim}.")
        self._queries = num_heads // self.num_key_value_heads
        self._local_heads = self.num_key_value_heads // (group.size if group else 1)
        self._tokens_group = token_group()
        check_whole_slices(self, self.sequence_parallel)
        heads = self._local_heads
        check_attention(self, self.context_attention, heads * self._queries, heads, self.dropout)

    def build(self, input_shape):
        """Builds the two products."""
        columns = self.num_key_value_heads * (self._queries + 2) * self.key_dim
        common = {"use_bias": self.use_bias, "sequence_parallel": self.sequence_parallel}
        self.qkv = ColumnParallelDense(
            columns,
            kernel_initializer=self.kernel_initializer,
            dtype=self.dtype_policy,
            name="qkv",
            **common,
        )
        self.output_dense = RowParallelDense(
            input_shape[-1],
            kernel_initializer=self.output_initializer or again(self.kernel_initializer),
            dtype=self.dtype_policy,
            name="attention_output",
            **common,
        )
        self.attention_dropout = Dropout(
            self.dropout, split=True, dtype=self.dtype_policy, name="attention_dropout"
        )
        self.qkv.build(input_shape)
        local = self._local_heads * self._queries * self.key_dim
        self.output_dense.build((*input_shape[:-1], local))
        self.built = True

    def call(self, inputs, attention_mask=None, training=None):
        """Attends.

        Args:
            inputs: Shape [batch, time, features].
            attention_mask: None, or bool of shape [batch, time, time] or [batch, 1, time]: whether a
                position (dim 1) may see another (dim 2), beside what `causal` says. One that sees
                nothing attends to zeros. On a context axis, dim 2 of the first has the tokens of the
                whole sequence, as an input of the model gives it, and that of the second this rank's.
            training: Whether attention weights are dropped.

        Returns:
            A tensor of the shape of the inputs.
        """
        heads, queries, size = self._local_heads, self._queries, self.key_dim
        tokens = None if self._tokens_group is None else current_tokens()
        fused = self.qkv(inputs)
        batch, time = tf.shape(fused)[0], fused.shape[1]
        time = tf.shape(fused)[1] if time is None else time
        fused = tf.reshape(fused, [batch, time, heads, queries + 2, size])
        # [queries + 2, batch, heads, time, size]: parts along dim 0 are views, not copies. The gradient
        # of slices would be a sum of tensors that are zero for the most part.
        fused = tf.transpose(fused, [3, 0, 2, 1, 4])
        query, key, value = tf.split(fused, [queries, 1, 1])
        key, value = tf.squeeze(key, 0), tf.squeeze(value, 0)
        if self.rotary_base is not None:
            positions = tf.range(time) if tokens is None else tokens.positions()
            query, key = (_rotate(part, self.rotary_base, positions) for part in (query, key))
        is_long = isinstance(time, int) and time >= _LONG and not (training and self.dropout)
        if is_long or tokens is not None:
            query = tf.transpose(query, [1, 2, 0, 3, 4])
            query = tf.reshape(query, [batch, heads * queries, time, size])
            attended = self._attend_by_blocks(query, key, value, attention_mask, tokens)
            attended = tf.transpose(attended, [0, 2, 1, 3])
        else:
            query = tf.reshape(query, [queries * batch, heads, time, size])
            if queries > 1:
                repeat = [queries, 1, 1, 1]
                key, value = tf.tile(key, repeat), tf.tile(value, repeat)
            attended = self._attend(query, key, value, attention_mask, training)
            attended = tf.reshape(attended, [queries, batch, heads, time, size])
            attended = tf.transpose(attended, [1, 3, 2, 0, 4])
        attended = tf.reshape(attended, [batch, time, heads * queries * size])
        attended = tf.ensure_shape(attended, [None, self._time(inputs), heads * queries * size])
        return self.output_dense(attended)

    def _attend_by_blocks(self, query, key, value, attention_mask, tokens):
        """As `_attend`, from queries of shape [batch, heads, time, size], without all scores at once."""
        if tokens is None or self._tokens_group is None:
            mask = None if attention_mask is None else tf.cast(attention_mask, tf.bool)[:, None]
            return blockwise_attention(query, key, value, causal=self.causal, mask=mask)
        return context_attention(
            query,
            key,
            value,
            tokens,
            self._tokens_group,
            kind=self.context_attention,
            causal=self.causal,
            mask=attention_mask,
            scale=1.0 / math.sqrt(self.key_dim),
            name=self.name,
        )

    def _attend(self, query, key, value, attention_mask, training):
        """From queries, keys and values of shape [.., heads, time, size] to what is attended to.

        A method of its own for `recompute(..., "selective")`, which leaves attention by blocks as it
        is: that recomputes its scores of itself.
        """
        query *= 1.0 / math.sqrt(self.key_dim)
        scores = tf.matmul(query, key, transpose_b=True)
        scores = self._mask(scores, attention_mask, self._queries)
        weights = tf.nn.softmax(scores) if scores.dtype.size > 2 else _narrow_softmax(scores)
        weights = self.attention_dropout(weights, training=training)
        attended = tf.matmul(weights, value)
        if attention_mask is None:
            return attended
        highest = tf.reduce_max(scores, axis=-1, keepdims=True)
        return tf.where(highest > scores.dtype.min / 8, attended, tf.zeros_like(attended))

    def _time(self, inputs) -> int | None:
        time = inputs.shape[1]
        if time is None or not self.sequence_parallel or self.qkv._group is None:
            return time
        return time * self.qkv._group.size

    def _mask(self, scores, attention_mask, queries: int):
        # Far below any score, and finite: a row that sees nothing is not NaN.
        lowest = scores.dtype.min / 2
        if self.causal:
            time = tf.shape(scores)[-1]
            seen = tf.linalg.band_part(tf.ones([time, time], tf.bool), -1, 0)
            scores += tf.where(seen, tf.zeros([], scores.dtype), lowest)
        if attention_mask is not None:
            seen = tf.tile(tf.cast(attention_mask, tf.bool)[:, None], [queries, 1, 1, 1])
            scores += tf.where(seen, tf.zeros([], scores.dtype), lowest / 2)
        return scores

    def compute_output_shape(self, inputs_shape, attention_mask_shape=None):
        """That of the input."""
        return inputs_shape

    def get_config(self):
        """The configuration, the same on any mesh."""
        serialize = keras.initializers.serialize
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "key_dim": self.key_dim,
            "num_key_value_heads": self.num_key_value_heads,
            "causal": self.causal,
            "dropout": self.dropout,
            "use_bias": self.use_bias,
            "rotary_base": self.rotary_base,
            "sequence_parallel": self.sequence_parallel,
            "context_attention": self.context_attention,
            "kernel_initializer": serialize(self.kernel_initializer),
            "output_initializer": self.output_initializer and serialize(self.output_initializer),
        }


@custom_gradient
def _narrow_softmax(scores):
    """The softmax over the last dim, computed in float32 and kept in the 16 bits of the scores."""
    weights = tf.cast(tf.nn.softmax(tf.cast(scores, tf.float32)), scores.dtype)

    def gradient(dy):
        kept, wide = tf.cast(weights, tf.float32), tf.cast(dy, tf.float32)
        along = tf.reduce_sum(kept * wide, axis=-1, keepdims=True)
        return tf.cast(kept * (wide - along), scores.dtype)

    return weights, gradient


def _rotate(x, base: float, positions):
    """Turns each pair of features (i, i + half) of [..., time, size] by its position's angle."""
    half = x.shape[-1] // 2
    rates = tf.constant([base ** (-i / half) for i in range(half)], tf.float32)
    angles = tf.cast(positions, tf.float32)[:, None] * rates
    cosine, sine = tf.cast(tf.cos(angles), x.dtype), tf.cast(tf.sin(angles), x.dtype)
    first, second = x[..., :half], x[..., half:]
    return tf.concat([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
