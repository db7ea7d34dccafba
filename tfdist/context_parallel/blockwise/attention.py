"""`blockwise_attention`: softmax attention whose memory is linear in the length, and not quadratic."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.context_parallel.blockwise.grid import Settings, Visibility, size_of
from tfdist.context_parallel.blockwise.passes import attention_gradients, attention_parts
from tfdist.utils import checks

#: The maximum numbers of queries and keys in a block, measured by `benchmarks.blockwise_attention`.
#: Blocks of many queries are faster, since the gradients of keys and values are products with a sum
#: over queries; small blocks are more often skipped, because nothing in them is seen.
_BLOCK, _CAUSAL_BLOCK = (1024, 256), (256, 256)
#: The same on GPUs, where a small block costs the time of its start.
_BLOCK_ON_GPUS = (1024, 1024)
#: The memory of all scores, with that of the backward pass, up to which a GPU computes them at once, and the
#: batch size that is assumed where a graph does not know it.
_WHOLE_BYTES, _BYTES_OF_A_SCORE, _ASSUMED_BATCH = 2 << 30, 6, 8


def blockwise_attention(
    query,
    key,
    value,
    *,
    causal: bool = False,
    query_offset: int | tf.Tensor | None = None,
    mask=None,
    document_starts=None,
    scale: float | None = None,
    soft_cap: float | None = None,
    block_size: int | Sequence[int] | None = None,
    return_lse: bool = False,
):
    """Computes softmax(scale Q K^T) V block by block.

    The scores of all queries and keys are never in memory at once. The forward pass keeps its output and
    the log-sum-exp of each row; the backward pass computes the scores again, block by block.

    Args:
        query: Shape [batch, heads, time, size], of a floating dtype. Batch and time may be unknown in
            a graph. float16 and bfloat16 are cast to float32 on CPUs; on GPUs only scores and sums are.
        key: Shape [batch, key_heads, key_time, size]. `heads` is a multiple of `key_heads`: consecutive
            query heads share a key head (grouped-query attention, Ainslie et al. 2023).
        value: Shape [batch, key_heads, key_time, value_size].
        causal: Whether a query sees only keys up to its own position.
        query_offset: With `causal`, the position of the first query among the keys, an int or a scalar
            tensor; None for key_time - time, so that the last query sees the last key.
        mask: None, or a bool tensor broadcastable to [batch, heads, time, key_time]: whether a query
            sees a key, in addition to `causal`. A dim of 1 is not expanded in memory.
        document_starts: None, or ints of shape [batch, time]: the place of the first key that each query
            sees, in addition to `causal`, such as that of its document.
        scale: The factor of scores; None for 1 / sqrt(size).
        soft_cap: None, or c: scores s become c tanh(s / c).
        block_size: The maximum numbers of queries and keys in a block, one number or two; None for sizes
            that are fast on the device.
        return_lse: Whether the log-sum-exp is returned too.

    Returns:
        A tensor of shape [batch, heads, time, value_size] and the dtype of `query`. The output of a query
        that sees no key is zero, and so are its gradients. With `return_lse` a pair of that and of the
        log-sum-exp of each query's scores: shape [batch, heads, time], float32 (float64 for float64
        queries), -inf if no key is seen. Both have gradients.

    Raises:
        TypeError: A tensor does not have a floating dtype.
        ValueError: The shapes or the arguments are inconsistent.

    Source: Rabe & Staats 2021, "Self-attention Does Not Need O(n^2) Memory"; Dao 2023,
    "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning".
    """
    query, key, value = (
        _heads(name, tensor) for name, tensor in (("query", query), ("key", key), ("value", value))
    )
    _check_shapes(query, key, value)
    causal = checks.boolean("causal", causal)
    checks.boolean("return_lse", return_lse)
    scale = checks.number("scale", scale, optional=True)
    soft_cap = checks.number("soft_cap", soft_cap, above=0, optional=True)
    mask = _checked_mask(mask, query, key)
    starts = _checked_starts(document_starts, query)
    seen = Visibility(causal, _offset(query, key, causal, query_offset), mask, starts)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    settings = default_settings(scale, by_query=seen.by_query)._replace(soft_cap=soft_cap)
    if block_size is not None:
        rows, columns = _block_sizes(block_size)
        settings = settings._replace(rows=rows, columns=columns)

    @custom_gradient
    def attend(query, key, value):
        wide, lse = attention_parts(query, key, value, seen, settings)
        out = tf.cast(wide, query.dtype)

        def gradient(of_out, of_lse):
            of_out = tf.cast(of_out, lse.dtype)
            delta = tf.reduce_sum(of_out * tf.cast(out, lse.dtype), axis=-1, keepdims=True)
            # A row that sees nothing has no gradient, whatever the gradient of its -inf is.
            delta -= tf.where(tf.math.is_inf(lse), tf.zeros_like(lse), of_lse[..., None])
            found = attention_gradients(query, key, value, of_out, lse, delta, seen, settings)
            inputs = (query, key, value)
            return [tf.cast(dx, x.dtype) for dx, x in zip(found, inputs, strict=True)]

        return (out, lse[..., 0]), gradient

    out, lse = attend(query, key, value)
    out = tf.ensure_shape(out, [*query.shape[:-1], value.shape[-1]])
    return (out, tf.ensure_shape(lse, query.shape[:-1])) if return_lse else out


def _tensor(name: str, value, meaning: str) -> tf.Tensor:
    try:
        return tf.convert_to_tensor(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise checks.refuse(name, value, meaning, TypeError) from error


def _heads(name: str, value) -> tf.Tensor:
    meaning = "a floating tensor [batch, heads, time, size] with heads and size known"
    tensor = _tensor(name, value, meaning)
    if not tensor.dtype.is_floating:
        raise checks.refuse(name, value, meaning, TypeError)
    if tensor.shape.rank != 4 or None in (tensor.shape[1], tensor.shape[3]):
        raise checks.refuse(name, value, f"{meaning}, and not of shape {tensor.shape}")
    return tensor


def _check_shapes(query, key, value) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise ValueError(
            "Keys and values must have the same number of heads (dim 1), of which the number of query "
            f"heads is a multiple. Received: {shapes}."
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"Queries and keys must have the same size (dim 3). Received: {shapes}.")
    same_time = key.shape[2:3].is_compatible_with(value.shape[2:3])
    batches = [tensor.shape[:1] for tensor in (key, value)]
    if not same_time or not all(query.shape[:1].is_compatible_with(batch) for batch in batches):
        raise ValueError(
            "All must have the same batch size (dim 0), and keys and values the same time (dim 2). "
            f"Received: {shapes}."
        )


def default_settings(scale: float, *, by_query: bool) -> Settings:
    """Settings with block sizes that are fast on this rank's device.

    Args:
        scale: The factor of scores.
        by_query: Whether different queries see different keys.
    """
    if devices.has_gpu():
        return Settings(scale, None, *_BLOCK_ON_GPUS)
    return Settings(scale, None, *(_CAUSAL_BLOCK if by_query else _BLOCK))


def fits_whole(batch: int | None, heads: int, queries: int, keys: int) -> bool:
    """Whether plain products of all queries and keys are faster than blocks: on a GPU, if the scores fit.

    Args:
        batch: The number of sequences; None if unknown.
        heads: The number of query heads.
        queries: The number of queries of a sequence.
        keys: The number of keys of a sequence.
    """
    scores = (batch or _ASSUMED_BATCH) * heads * queries * keys
    return devices.has_gpu() and scores * _BYTES_OF_A_SCORE <= _WHOLE_BYTES


def _block_sizes(block_size) -> tuple[int, int]:
    sizes = block_size if isinstance(block_size, tuple | list) else (block_size, block_size)
    try:
        rows, columns = checks.integers("block_size", sizes, minimum=1)
    except ValueError as error:
        meaning = "an int of at least 1, or two: of queries and of keys"
        raise checks.refuse("block_size", block_size, meaning) from error
    return rows, columns


def _offset(query, key, causal: bool, query_offset):
    if query_offset is None:
        return size_of(key, 2) - size_of(query, 2) if causal else 0
    if not causal:
        raise ValueError(
            "`query_offset` requires causal attention. Received: "
            f"query_offset={checks.shown(query_offset)}, causal=False."
        )
    if tf.is_tensor(query_offset):
        if not query_offset.dtype.is_integer or query_offset.shape.rank not in (0, None):
            raise checks.refuse("query_offset", query_offset, "an int, or a scalar tensor of ints")
        return tf.cast(query_offset, tf.int32)
    return checks.integer("query_offset", query_offset, minimum=-checks.LARGEST)


def _checked_starts(starts, query):
    """The starts of documents as floats, which GPUs compare."""
    if starts is None:
        return None
    meaning = "a tensor of ints of shape [batch, time], or None"
    tensor = _tensor("document_starts", starts, meaning)
    if not tensor.dtype.is_integer:
        raise checks.refuse("document_starts", starts, meaning, TypeError)
    if not tensor.shape.is_compatible_with([query.shape[0], query.shape[2]]):
        raise checks.refuse("document_starts", starts, f"{meaning}, and not of {tensor.shape}")
    return tf.cast(tensor, tf.float32)


def _checked_mask(mask, query, key):
    """The mask, expanded to four dims."""
    if mask is None:
        return None
    meaning = "a bool tensor broadcastable to [batch, heads, time, key_time], or None"
    given, mask = mask, _tensor("mask", mask, meaning)
    if mask.dtype != tf.bool:
        raise checks.refuse("mask", given, meaning, TypeError)
    scores = tf.TensorShape([*query.shape[:3], key.shape[2]])
    rank = mask.shape.rank
    fits = rank is not None and rank <= 4
    for dim, whole in zip(reversed(mask.shape), reversed(scores), strict=False) if fits else ():
        fits = fits and (dim in (1, None) or whole in (dim, None))
    if not fits:
        raise checks.refuse(
            "mask", given, f"{meaning}, here {scores}, and not of shape {mask.shape}"
        )
    for _ in range(4 - rank):
        mask = mask[None]
    return mask
