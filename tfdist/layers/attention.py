"""Self-attention with the heads split over the tensor axis."""

from __future__ import annotations

import math

import keras
import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.collectives.engine import shape_of
from tfdist.context_parallel import KINDS, check_attention, check_whole_slices, context_attention
from tfdist.context_parallel.blockwise import blockwise_attention, fits_whole
from tfdist.layers.base import check_divides
from tfdist.layers.dense import ColumnParallelDense, TwoProducts
from tfdist.layers.dropout import Dropout
from tfdist.sharding.weights import token_group
from tfdist.step.context import current_tokens
from tfdist.utils import checks

#: The minimum length for attention by blocks, which is then faster and needs less memory.
_LONG = 1024


@keras.saving.register_keras_serializable(package="tfdist")
class ParallelMultiHeadAttention(TwoProducts):
    """Self-attention whose heads are split over the tensor ranks.

    Queries, keys and values are one product (fused QKV), which is split by columns; the projection
    of the heads' outputs is split by rows. With fewer key/value heads than query heads this is
    grouped-query attention (Ainslie et al. 2023); a key/value head and its queries are always on the
    same rank.

    Sequences of 1,024 tokens and more use `blockwise_attention`, if their length is known and no attention
    weights are dropped.

    On a context axis, whose ranks have different tokens, queries attend to the tokens of all ranks.
    `context_attention` is the way in which keys and values are exchanged:

    - "ring": from rank to rank, while each rank computes with its current ones (Liu et al. 2023).
    - "all_gather": every rank gathers all of them first (Llama team 2024).
    - "ulysses": every rank receives all tokens of an equal part of the heads (Jacobs et al. 2023).

    The columns of the fused kernel are ordered by key/value head: its queries, its key, its value.

    Args:
        num_heads: The global number of query heads.
        key_dim: The size of a head.
        num_key_value_heads: The global number of key/value heads; None for `num_heads`.
        causal: Whether a position sees only itself and earlier positions.
        dropout: The fraction of attention weights that are dropped.
        use_bias: Whether both products have a bias.
        rotary_base: None, or the base of rotary position embeddings (Su et al. 2021): 10000.
        sequence_parallel: Whether input and output are this tensor rank's slice of dim 1.
        context_attention: "ring", "all_gather" or "ulysses"; ignored without a context axis.
        kernel_initializer: For the fused kernel.
        output_initializer: For the kernel of the projection; None for the same.
        **kwargs: As for `keras.layers.Layer`.

    Raises:
        ValueError: `num_heads` is not a multiple of `num_key_value_heads`, these are not a multiple of the
            size of the tensor axis, or the context axis does not support the arguments.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    _arguments = (
        *TwoProducts._arguments,
        "num_heads",
        "key_dim",
        "num_key_value_heads",
        "causal",
        "dropout",
        "rotary_base",
        "context_attention",
    )

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
        super().__init__(
            use_bias=use_bias,
            sequence_parallel=sequence_parallel,
            kernel_initializer=kernel_initializer,
            output_initializer=output_initializer,
            **kwargs,
        )
        self.num_heads = num_heads = checks.integer("num_heads", num_heads, minimum=1)
        self.key_dim = checks.integer("key_dim", key_dim, minimum=1)
        groups = checks.integer(
            "num_key_value_heads", num_key_value_heads, minimum=1, optional=True
        )
        self.num_key_value_heads = groups = groups or num_heads
        self.causal = checks.boolean("causal", causal)
        self.dropout = checks.number("dropout", dropout, minimum=0, maximum=1)
        self.rotary_base = checks.number("rotary_base", rotary_base, above=0, optional=True)
        self.context_attention = checks.one_of("context_attention", context_attention, KINDS)
        if num_heads % groups:
            raise ValueError(
                "num_heads must be a multiple of num_key_value_heads. Received: "
                f"num_heads={num_heads}, num_key_value_heads={groups}."
            )
        what = "num_heads" if groups == num_heads else "num_key_value_heads"
        check_divides(what, groups, self._group, self)
        if rotary_base is not None and key_dim % 2:
            raise ValueError(
                f"Rotary position embeddings require an even key_dim. Received: {key_dim}."
            )
        self._queries = num_heads // groups
        self._local_heads = heads = groups // self._ranks
        self._tokens_group = token_group()
        check_whole_slices(self, self.sequence_parallel)
        check_attention(self, self.context_attention, heads * self._queries, heads, self.dropout)

    def build(self, input_shape):
        """Builds the two products."""
        columns = self.num_key_value_heads * (self._queries + 2) * self.key_dim
        self.qkv = self._product(ColumnParallelDense, columns, self.kernel_initializer, "qkv")
        self.output_dense = self._output_product(input_shape[-1], "attention_output")
        self.attention_dropout = Dropout(
            self.dropout, split=True, dtype=self.dtype_policy, name="attention_dropout"
        )
        self.qkv.build(input_shape)
        local = self._local_heads * self._queries * self.key_dim
        self.output_dense.build((*input_shape[:-1], local))
        self.built = True

    def call(self, inputs, attention_mask=None, document_starts=None, training=None):
        """Computes attention.

        Args:
            inputs: Shape [batch, time, features].
            attention_mask: None, or bool of shape [batch, time, time] or [batch, 1, time]: whether a
                position (dim 1) sees another (dim 2), in addition to `causal`. The output of a position
                that sees nothing is zero before the projection. On a context axis, dim 2 of the first
                shape has the tokens of the whole sequence, as in an input of the model, and dim 2 of the
                second those of this rank.
            document_starts: None, or ints of shape [batch, time], for rows of several documents: the place
                in the row of the first token of each token's document. No token sees another document,
                and rotary positions begin again in each. On a context axis, dim 1 has this rank's tokens.
            training: Whether attention weights are dropped.

        Returns:
            A tensor of the shape of the inputs.
        """
        if document_starts is not None and not self.causal:
            raise ValueError(
                f"`document_starts` requires causal attention. Received: causal=False in `{self.name}`. Use "
                "an `attention_mask`."
            )
        heads, queries, size = self._local_heads, self._queries, self.key_dim
        tokens = None if self._tokens_group is None else current_tokens()
        fused = self.qkv(inputs)
        batch, time, _ = shape_of(fused)
        fused = tf.reshape(fused, [batch, time, heads, queries + 2, size])
        has_gpu = devices.has_gpu()
        query, key, value = (_split_on_gpus if has_gpu else _split_on_cpus)(fused, queries)
        if self.rotary_base is not None:
            positions = tf.range(time) if tokens is None else tokens.positions()
            if document_starts is not None:
                positions -= tf.cast(document_starts, positions.dtype)
            query, key = (_rotate(part, self.rotary_base, positions) for part in (query, key))
        is_long = isinstance(time, int) and time >= _LONG and not (training and self.dropout)
        if is_long and has_gpu:
            is_long = not fits_whole(inputs.shape[0], heads * queries, time, time)
        if is_long or tokens is not None:
            if not has_gpu:
                query = tf.transpose(query, [1, 2, 0, 3, 4])
                query = tf.reshape(query, [batch, heads * queries, time, size])
            attended = self._attend_by_blocks(
                query, key, value, attention_mask, document_starts, tokens
            )
            attended = tf.transpose(attended, [0, 2, 1, 3])
        elif has_gpu:
            if queries > 1:
                key, value = tf.repeat(key, queries, axis=1), tf.repeat(value, queries, axis=1)
            mask = _expanded(attention_mask, document_starts)
            attended = self._attend(query, key, value, mask, training)
            attended = tf.transpose(attended, [0, 2, 1, 3])
        else:
            query = tf.reshape(query, [queries * batch, heads, time, size])
            mask, repeat = _expanded(attention_mask, document_starts), [queries, 1, 1, 1]
            if queries > 1:
                key, value = tf.tile(key, repeat), tf.tile(value, repeat)
                mask = None if mask is None else tf.tile(mask, repeat)
            attended = self._attend(query, key, value, mask, training)
            attended = tf.reshape(attended, [queries, batch, heads, time, size])
            attended = tf.transpose(attended, [1, 3, 2, 0, 4])
        attended = tf.reshape(attended, [batch, time, heads * queries * size])
        attended = tf.ensure_shape(
            attended, [None, self._shape_of_whole(inputs.shape)[1], heads * queries * size]
        )
        return self.output_dense(attended)

    def _attend_by_blocks(self, query, key, value, attention_mask, document_starts, tokens):
        """Computes the same as `_attend` for queries [batch, heads, time, size], without all scores at once."""
        if tokens is None or self._tokens_group is None:
            mask = _expanded(attention_mask)
            return blockwise_attention(
                query, key, value, causal=self.causal, mask=mask, document_starts=document_starts
            )
        return context_attention(
            query,
            key,
            value,
            tokens,
            self._tokens_group,
            kind=self.context_attention,
            causal=self.causal,
            mask=attention_mask,
            document_starts=document_starts,
            scale=1.0 / math.sqrt(self.key_dim),
            name=self.name,
        )

    def _attend(self, query, key, value, mask, training):
        """The output for queries, keys and values of shape [..., heads, time, size].

        A separate method for `recompute(..., "selective")`; attention by blocks always recomputes its
        scores.
        """
        query *= 1.0 / math.sqrt(self.key_dim)
        scores = tf.matmul(query, key, transpose_b=True)
        scores = self._mask(scores, mask)
        weights = tf.nn.softmax(scores) if scores.dtype.size > 2 else _narrow_softmax(scores)
        weights = self.attention_dropout(weights, training=training)
        attended = tf.matmul(weights, value)
        if mask is None:
            return attended
        highest = tf.reduce_max(scores, axis=-1, keepdims=True)
        return tf.where(highest > scores.dtype.min / 8, attended, tf.zeros_like(attended))

    def _mask(self, scores, mask):
        # Finite, so that a row that sees nothing is not NaN.
        lowest = scores.dtype.min / 2
        if self.causal:
            time = tf.shape(scores)[-1]
            seen = tf.linalg.band_part(tf.ones([time, time], tf.bool), -1, 0)
            scores += tf.where(seen, tf.zeros([], scores.dtype), lowest)
        if mask is not None:
            scores += tf.where(mask, tf.zeros([], scores.dtype), lowest / 2)
        return scores

    def compute_output_shape(
        self, inputs_shape, attention_mask_shape=None, document_starts_shape=None
    ):
        """The shape of the input."""
        return inputs_shape


def _split_on_cpus(fused, queries: int) -> tuple:
    """Queries [queries, batch, heads, time, size], keys and values [batch, heads, time, size].

    One transpose, after which parts along dim 0 are views and not copies. The gradient of slices would be a sum of
    tensors that are mostly zero.

    Args:
        fused: Shape [batch, time, heads, queries + 2, size].
        queries: The number of query heads of a key/value head.
    """
    query, key, value = tf.split(tf.transpose(fused, [3, 0, 2, 1, 4]), [queries, 1, 1])
    return query, tf.squeeze(key, 0), tf.squeeze(value, 0)


def _split_on_gpus(fused, queries: int) -> list:
    """Queries [batch, heads * queries, time, size], keys and values [batch, heads, time, size].

    A GPU has fast kernels for transposes of up to three adjacent groups of dims, and not of five dims.
    """
    batch, time, heads, _, size = shape_of(fused)
    parts = tf.split(fused, [queries, 1, 1], axis=3)
    counts = [heads * queries, heads, heads]
    flat = [tf.reshape(p, [batch, time, c, size]) for p, c in zip(parts, counts, strict=True)]
    return [tf.transpose(part, [0, 2, 1, 3]) for part in flat]


def _expanded(attention_mask, document_starts=None):
    """A mask [batch, time or 1, time] as bool, with a dim for the heads, without earlier documents."""
    mask = None if attention_mask is None else tf.cast(attention_mask, tf.bool)[:, None]
    if document_starts is None:
        return mask
    starts = tf.convert_to_tensor(document_starts)
    places = tf.range(tf.shape(starts)[1], dtype=starts.dtype)
    seen = (places >= starts[:, :, None])[:, None]
    return seen if mask is None else tf.logical_and(mask, seen)


@custom_gradient
def _narrow_softmax(scores):
    """The softmax over the last dim, computed in float32 and kept in the scores' 16-bit dtype."""
    weights = tf.cast(tf.nn.softmax(tf.cast(scores, tf.float32)), scores.dtype)

    def gradient(dy):
        kept, wide = tf.cast(weights, tf.float32), tf.cast(dy, tf.float32)
        along = tf.reduce_sum(kept * wide, axis=-1, keepdims=True)
        return tf.cast(kept * (wide - along), scores.dtype)

    return weights, gradient


def _rotate(x, base: float, positions):
    """Rotates each pair of features (i, i + half) of [..., time, size] by the angle of its position.

    Positions have shape [time]; or [batch, time], for [..., batch, heads, time, size].
    """
    half = x.shape[-1] // 2
    rates = tf.constant([base ** (-i / half) for i in range(half)], tf.float32)
    angles = tf.cast(positions, tf.float32)[..., None] * rates
    angles = angles[:, None] if angles.shape.rank == 3 else angles
    cosine, sine = tf.cast(tf.cos(angles), x.dtype), tf.cast(tf.sin(angles), x.dtype)
    first, second = x[..., :half], x[..., half:]
    return tf.concat([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
