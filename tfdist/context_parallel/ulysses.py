"""Attention of all tokens and some heads on each rank, between two all-to-alls.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme
Long Sequence Transformer Models".
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.collectives import all_to_all
from tfdist.context_parallel.blockwise import blockwise_attention
from tfdist.context_parallel.blockwise.grid import padded, size_of
from tfdist.context_parallel.masks import Arguments
from tfdist.step.token_split import TokenSplit


def ulysses(query, key, value, given: Arguments):
    """Computes attention after an exchange of heads.

    Args:
        query: Shape [batch, heads, 2 chunks, size].
        key: Shape [batch, groups, 2 chunks, size].
        value: Of the same shape as `key`.
        given: The other arguments.

    Returns:
        A tensor of the shape of the query.
    """
    tokens, group = given.tokens, given.group
    ranks = group.size
    if key.shape[1] % ranks:
        copies = ranks // key.shape[1]
        key, value = tf.repeat(key, copies, axis=1), tf.repeat(value, copies, axis=1)
    heads, groups = query.shape[1] // ranks, key.shape[1] // ranks
    parts = [_by_rank(query, ranks), _by_rank(key, ranks), _by_rank(value, ranks)]
    arrived = all_to_all(tf.concat(parts, axis=2), group, name=f"{given.name}/heads")
    fused = _in_order(arrived, tokens)
    query, key, value = tf.split(fused, [heads, groups, groups], axis=1)
    found = blockwise_attention(
        query,
        key,
        value,
        causal=given.causal,
        mask=_mask(given),
        document_starts=_starts(given),
        scale=given.scale,
    )
    back = all_to_all(_by_source(found, tokens), group, name=f"{given.name}/outputs")
    batch, chunks, size = size_of(back, 1), size_of(back, 3), back.shape[-1]
    return tf.reshape(tf.transpose(back, [1, 0, 2, 3, 4]), [batch, ranks * heads, chunks, size])


def _by_rank(tensor, ranks: int):
    """[batch, heads, time, size] to [ranks, batch, heads / ranks, time, size]."""
    batch, heads, time, size = (size_of(tensor, axis) for axis in range(4))
    parts = tf.reshape(tensor, [batch, ranks, heads // ranks, time, size])
    return tf.transpose(parts, [1, 0, 2, 3, 4])


def _in_order(arrived, tokens: TokenSplit):
    """[ranks, batch, heads, 2 chunks, size] to all tokens of the sequence, [batch, heads, total, size]."""
    ranks, batch, heads, _, size = (size_of(arrived, axis) for axis in range(5))
    chunk = tokens.chunk
    late = tf.reverse(arrived[:, :, :, chunk:], [0])
    chunks = tf.concat([arrived[:, :, :, :chunk], late], axis=0)
    chunks = tf.transpose(chunks, [1, 2, 0, 3, 4])
    whole = tf.reshape(chunks, [batch, heads, 2 * ranks * chunk, size])
    return whole if tokens.is_even else whole[:, :, : tokens.total]


def _by_source(found, tokens: TokenSplit):
    """The inverse of `_in_order`: [batch, heads, total, size] to [ranks, batch, heads, 2 chunks, size]."""
    ranks, chunk = tokens.parts, tokens.chunk
    found = padded(found, 2 * ranks * chunk, 2)
    batch, heads, _, size = (size_of(found, axis) for axis in range(4))
    chunks = tf.reshape(found, [batch, heads, 2 * ranks, chunk, size])
    chunks = tf.transpose(chunks, [2, 0, 1, 3, 4])
    late = tf.reverse(chunks[ranks:], [0])
    return tf.concat([chunks[:ranks], late], axis=3)


def _starts(given: Arguments):
    """The starts of the documents of all tokens: [batch, total], or None."""
    if given.starts is None:
        return None
    every = given.gather_mask(tf.cast(given.starts, tf.int32), "document-starts")
    return _in_order(every[:, :, None, :, None], given.tokens)[:, 0, :, 0]


def _mask(given: Arguments):
    """The mask of all tokens: [batch or 1, 1, total or 1, total], or None."""
    found: Any = None
    if given.keys is not None:
        every = given.gather_mask(given.keys, "key-mask")
        found = _in_order(every[:, :, None, :, None], given.tokens)[..., 0][:, :, None]
    if given.pairs is not None:
        seen = _in_order(given.gather_mask(given.pairs, "mask")[:, :, None], given.tokens)
        found = seen if found is None else tf.logical_and(found, seen)
    return found
