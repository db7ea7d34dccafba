"""The exchange of rows with the ranks of their experts."""

from __future__ import annotations

import tensorflow as tf

from tfdist.collectives import Group, all_to_all
from tfdist.experts.permutation import reorder


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
            rows = reorder(rows, tf.math.invert_permutation(self._order))
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
