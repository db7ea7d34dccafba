"""The computation of tokens by their chosen experts, on the ranks of these."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.collectives import Group
from tfdist.experts.exchange import Exchange
from tfdist.experts.permutation import Permutation, combine, gather_rows
from tfdist.step.context import current_replica
from tfdist.step.keras_step import with_global_gradient, with_local_gradient


def through_experts(
    tokens: tf.Tensor,
    gates: tf.Tensor,
    permutation: Permutation,
    networks: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    group: Group | None,
    name: str,
) -> tf.Tensor:
    """Computes for each token the sum of its experts' outputs, times their gates.

    Args:
        tokens: [tokens, width].
        gates: float32, [tokens, top_k].
        permutation: The order of the experts.
        networks: A function from rows [rows, width], in the order of this rank's experts, and the number
            of rows of each expert to rows of the same shape.
        group: The ranks over which the experts are split, in order; None for this rank alone.
        name: For messages.

    Returns:
        [tokens, width].
    """
    if group is None:
        rows = gather_rows(tokens, permutation)
        return combine(networks(rows, permutation.counts), gates, permutation)
    replica = current_replica()
    step = None if replica is None else replica.step
    # An expert has tokens of several ranks, whose losses are weighted by their shares of the batch.
    tokens, gates = with_local_gradient(tokens, step), with_local_gradient(gates, step)
    exchange = Exchange(permutation.counts, group, name)
    rows = exchange.dispatch(gather_rows(tokens, permutation))
    rows = exchange.collect(networks(rows, exchange.counts))
    return with_global_gradient(combine(rows, gates, permutation), step)


def are_there() -> tf.Tensor | None:
    """Whether the current rows belong to the batch, and are not padding; None if all ranks have rows."""
    replica = current_replica()
    if replica is None or replica.has_padding is None:
        return None
    return tf.logical_not(replica.has_padding)
