"""`context_attention`: attention of this rank's queries to the keys of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.rematerialize import keep
from tfdist.collectives import Group
from tfdist.context_parallel.gathered import gathered_forward, gathered_gradients
from tfdist.context_parallel.masks import Masks, padded
from tfdist.context_parallel.pairs import Pairs, in_turn
from tfdist.context_parallel.ring import ring_forward, ring_gradients
from tfdist.context_parallel.ulysses import ulysses
from tfdist.step.context import current_step
from tfdist.step.keras_step import weighted
from tfdist.step.token_split import TokenSplit

_BY_PAIRS = {
    "ring": (ring_forward, ring_gradients),
    "all_gather": (gathered_forward, gathered_gradients),
}
#: How keys and values get to the queries of other ranks.
KINDS = (*_BY_PAIRS, "ulysses")


def context_attention(
    query,
    key,
    value,
    tokens: TokenSplit,
    group: Group,
    *,
    kind: str = "ring",
    causal: bool = False,
    mask=None,
    scale: float,
    name: str,
):
    """softmax(scale Q K^T) V, where each rank has other tokens.

    Args:
        query: Shape [batch, heads, tokens of this rank, size], of a floating dtype.
        key: Shape [batch, key_heads, tokens of this rank, size]; the key heads divide the heads.
        value: Of that shape.
        tokens: How ranks divide the sequence.
        group: The ranks.
        kind: One of `KINDS`.
        causal: Whether a query sees only keys up to its own place.
        mask: None, or bool: of shape [batch or 1, 1, tokens of this rank], whether its keys are seen; or
            of shape [batch or 1, tokens of this rank, tokens of the sequence], what its queries see.
        scale: What scores are multiplied by.
        name: For messages.

    Returns:
        A tensor of the shape and dtype of the query. A query that sees no key gives zeros.
    """
    whole = 2 * tokens.chunk
    given = query.shape
    count = tf.shape(query)[2]
    keys, pairs = _masks(mask, tokens, name)
    attend: Callable
    query, key, value = (padded(tensor, whole, 2) for tensor in (query, key, value))
    if kind == "ulysses":
        attend = functools.partial(
            ulysses,
            tokens=tokens,
            group=group,
            causal=causal,
            keys=keys,
            pairs=pairs,
            scale=scale,
            name=name,
        )
    else:
        work = Pairs(tokens, causal, Masks(tokens, group, causal, keys, pairs, name), scale)
        attend = _by_pairs(work, group, kind, name)
    found = weighted(attend, (query, key, value), current_step())
    return tf.ensure_shape(found if tokens.is_even else found[:, :, :count], given)


def _by_pairs(pairs: Pairs, group: Group, kind: str, name: str) -> Callable:
    """From query, key and value to the output."""
    forward, backward = _BY_PAIRS[kind]

    @custom_gradient
    def attend(query, key, value):
        wide, lse = forward(query, key, value, pairs, group, name)
        # What other ranks sent is not kept for the backward pass: these two are, of this rank's size.
        out, lse = keep(tf.cast(wide, query.dtype)), keep(lse)

        def gradient(of_out):
            of_out = tf.cast(of_out, lse.dtype)
            delta = tf.reduce_sum(of_out * tf.cast(out, lse.dtype), axis=-1, keepdims=True)
            rows = (query, of_out, lse, delta)
            # Keys and values are there since the forward pass: sent before its end, those of all layers
            # would stand on the ranks that they go to.
            with in_turn(delta):
                found = backward(rows, key, value, pairs, group, f"{name}/backward")
            inputs = (query, key, value)
            return [tf.cast(dx, x.dtype) for dx, x in zip(found, inputs, strict=True)]

        return out, gradient

    return attend


def _masks(mask: Any, tokens: TokenSplit, name: str) -> tuple:
    """A mask of keys, and one of pairs of queries and keys; one or both are None."""
    if mask is None:
        return None, None
    mask = tf.cast(mask, tf.bool)
    if mask.shape[1] == 1:
        return mask[:, 0], None
    said = (
        f"`{name}` gets a mask of shape [batch, 1, tokens of this rank] for keys, or one of shape "
        "[batch, tokens of this rank, tokens of the sequence] for pairs, as an input of the model gives"
    )
    tf.debugging.assert_equal(tf.shape(mask)[2], tokens.total, said)
    return None, mask
