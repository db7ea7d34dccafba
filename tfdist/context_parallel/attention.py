"""`context_attention`: attention of this rank's queries to the keys of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.custom_gradient import custom_gradient
from tfdist.backend.graph.rematerialize import keep
from tfdist.collectives import Group
from tfdist.context_parallel.blockwise.grid import padded
from tfdist.context_parallel.gathered import Gathered
from tfdist.context_parallel.masks import Arguments
from tfdist.context_parallel.pairs import Pairs, in_turn
from tfdist.context_parallel.ring import Ring
from tfdist.context_parallel.ulysses import ulysses
from tfdist.step.context import current_step
from tfdist.step.keras_step import weighted
from tfdist.step.token_split import TokenSplit

_EXCHANGES: dict[str, type[Ring] | type[Gathered]] = {"ring": Ring, "all_gather": Gathered}
#: The ways in which ranks exchange keys and values.
KINDS = (*_EXCHANGES, "ulysses")


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
    document_starts=None,
    scale: float,
    name: str,
):
    """Computes softmax(scale Q K^T) V, if each rank has different tokens.

    Args:
        query: Shape [batch, heads, tokens of this rank, size], of a floating dtype.
        key: Shape [batch, key_heads, tokens of this rank, size]; `heads` is a multiple of `key_heads`.
        value: Of the same shape as `key`.
        tokens: The split of the sequence among ranks.
        group: The ranks.
        kind: One of `KINDS`.
        causal: Whether a query sees only keys up to its own position.
        mask: None, or bool: of shape [batch or 1, 1, tokens of this rank], whether its keys are seen; or
            of shape [batch or 1, tokens of this rank, tokens of the sequence], which keys its queries see.
        document_starts: None, or ints of shape [batch, tokens of this rank]: the place in the sequence of the
            first key that each of its queries sees.
        scale: The factor of scores.
        name: For messages.

    Returns:
        A tensor of the shape and dtype of the query. The output of a query that sees no key is zero.
    """
    whole = 2 * tokens.chunk
    keys, pairs = _masks(mask, tokens, name)
    starts = None if document_starts is None else tf.cast(document_starts, tf.float32)
    given = Arguments(tokens, group, causal, keys, pairs, starts, scale, name)
    padded_inputs = tuple(padded(tensor, whole, 2) for tensor in (query, key, value))
    attend = (
        _by_pairs(given, _EXCHANGES[kind]) if kind in _EXCHANGES else partial(ulysses, given=given)
    )
    found = weighted(attend, padded_inputs, current_step())
    found = found if tokens.is_even else found[:, :, : tf.shape(query)[2]]
    return tf.ensure_shape(found, query.shape)


def _by_pairs(given: Arguments, exchange: type[Ring] | type[Gathered]) -> Callable:
    """A function from query, key and value to the output, which computes with one rank's keys at a time."""
    pairs, group, name = Pairs(given), given.group, given.name

    @custom_gradient
    def attend(query, key, value):
        columns = exchange(key, value, group, name)
        found: Any = None
        for _ in range(group.size):
            # The next keys are also requested in turn, so that at most two sets exist at once.
            with in_turn(found):
                found = pairs.attend(query, columns.next(), found)
        wide, lse = found
        # Tensors of other ranks are not kept for the backward pass: only these two, of this rank's size.
        out, lse = keep(tf.cast(wide, query.dtype)), keep(lse)

        def gradient(of_out):
            of_out = tf.cast(of_out, lse.dtype)
            delta = tf.reduce_sum(of_out * tf.cast(out, lse.dtype), axis=-1, keepdims=True)
            rows, of_query = (query, of_out, lse, delta), None
            # Keys and values are ready since the forward pass: without this order, those of all layers
            # would be sent early, and be in memory on the ranks that receive them.
            with in_turn(delta):
                columns = exchange(key, value, group, f"{name}/backward")
                for _ in range(group.size):
                    with in_turn(of_query):
                        of_rows, *of_columns = pairs.gradients(rows, columns.next())
                    of_query = of_rows if of_query is None else of_query + of_rows
                    columns.add(of_columns)
                found = (of_query, *columns.gradients())
            inputs = (query, key, value)
            return [tf.cast(dx, x.dtype) for dx, x in zip(found, inputs, strict=True)]

        return out, gradient

    return attend


def _masks(mask: Any, tokens: TokenSplit, name: str) -> tuple:
    """The mask of keys, and that of pairs of queries and keys; one or both are None."""
    if mask is None:
        return None, None
    mask = tf.cast(mask, tf.bool)
    if mask.shape[1] == 1:
        return mask[:, 0], None
    message = (
        f"The mask of `{name}` must have shape [batch, 1, tokens of this rank] for keys, or [batch, "
        "tokens of this rank, tokens of the sequence] for pairs, as in an input of the model"
    )
    length = tf.shape(mask)[2]
    with devices.on_host():
        tf.debugging.assert_equal(length, tokens.total, message)
    return None, mask
