"""The computation of tokens by their chosen experts, on the ranks of these."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.reorder import reorder
from tfdist.collectives import Group, all_to_all
from tfdist.experts.permutation import Permutation, combine, gather_rows
from tfdist.step.context import current_replica, current_step
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
    step = current_step()
    # An expert has tokens of several ranks, whose losses are weighted by their shares of the batch.
    tokens, gates = with_local_gradient(tokens, step), with_local_gradient(gates, step)
    exchange = Exchange(permutation.counts, group, name)
    rows = exchange.dispatch(gather_rows(tokens, permutation))
    rows = exchange.collect(networks(rows, exchange.counts))
    return with_global_gradient(combine(rows, gates, permutation), step)


class Exchange:
    """The two all-to-alls of a layer: rows are sent, and their results are returned.

    A rank receives rows ordered by source rank, and within each by expert. They are reordered by expert, so
    that the rows of an expert are contiguous.

    Args:
        counts: This rank's rows for each expert: int32, [num_experts].
        group: The ranks over which the experts are split, in order.
        name: For messages.

    Attributes:
        counts: The rows of all ranks for each of this rank's experts: int32, [num_experts / ranks].
    """

    def __init__(self, counts: tf.Tensor, group: Group, name: str):
        self._group, self._name = group, name
        own = counts.shape[0] // group.size
        with devices.on_host():
            self._splits = tf.reduce_sum(tf.reshape(counts, [group.size, own]), axis=1)
            arriving = all_to_all(counts, group, name=f"{name}/counts")
            arriving = tf.reshape(arriving, [group.size, own])
            self.counts = tf.reduce_sum(arriving, axis=0)
            self._arriving = tf.reduce_sum(arriving, axis=1)
            self._order = None if own == 1 else _by_expert(arriving)

    def dispatch(self, rows: tf.Tensor) -> tf.Tensor:
        """Sends rows [rows, width], in the order of experts; returns those of this rank's experts."""
        found, _ = all_to_all(rows, self._group, self._splits, name=f"{self._name}/dispatch")
        found.set_shape([None, rows.shape[1]])
        return found if self._order is None else reorder(found, self._order)

    def collect(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the result of each row to the rank that sent it, in the original order."""
        if self._order is not None:
            with devices.on_host():
                order = tf.math.invert_permutation(self._order)
            rows = reorder(rows, order)
        found, _ = all_to_all(rows, self._group, self._arriving, name=f"{self._name}/combine")
        found.set_shape([None, rows.shape[1]])
        return found


def _by_expert(arriving: tf.Tensor) -> tf.Tensor:
    """The order that changes runs of rows from [ranks, experts] to [experts, ranks]."""
    flat = tf.reshape(arriving, [-1])
    begins = tf.reshape(tf.cumsum(flat, exclusive=True), tf.shape(arriving))
    begins = tf.reshape(tf.transpose(begins), [-1])
    sizes = tf.reshape(tf.transpose(arriving), [-1])
    return tf.ragged.range(begins, begins + sizes).values


def are_there() -> tf.Tensor | None:
    """Whether the current rows belong to the batch, and are not padding; None if all ranks have rows."""
    replica = current_replica()
    if replica is None or replica.has_padding is None:
        return None
    with devices.on_host():
        return tf.logical_not(replica.has_padding)
