"""The permutation of tokens into the order of their experts, and its inverse.

Sorting needs memory for tokens x top_k rows; one-hot matrices, as in GShard, need it for tokens x experts x
capacity. Both directions are gathers, and so are their gradients here, for which TensorFlow would use
scatters.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist.backend import devices
from tfdist.backend.graph.custom_gradient import custom_gradient


@dataclasses.dataclass(frozen=True)
class Permutation:
    """The choices of tokens in the order of their experts; a choice is one expert of one token.

    Attributes:
        choices: The number of the choice in each row, token * top_k + place: int32, [rows].
        rows: The row of each choice: int32, [tokens, top_k]; 0 for choices without a row.
        counts: The number of rows of each expert: int32, [num_experts].
        kept: Whether each choice has a row: [tokens, top_k]; None if all have.
    """

    choices: tf.Tensor
    rows: tf.Tensor
    counts: tf.Tensor
    kept: tf.Tensor | None

    @property
    def top_k(self) -> int:
        """The number of experts of a token."""
        return self.rows.shape[1]

    @property
    def tokens(self) -> tf.Tensor:
        """The token of each row."""
        return self.choices // self.top_k


def capacity_of(tokens: tf.Tensor, top_k: int, num_experts: int, factor: float) -> tf.Tensor:
    """The maximum number of rows of an expert: its even share of the choices, times a factor.

    Source: Lepikhin et al. 2020, "GShard".
    """
    even = tf.cast(tokens, tf.float64) * (top_k / num_experts)
    return tf.cast(tf.math.ceil(even * factor), tf.int32)


def count_by_expert(experts: tf.Tensor, num_experts: int | tf.Tensor) -> tf.Tensor:
    """How often each expert is chosen: int32, [num_experts]; in contrast to `bincount` of a known size.

    Args:
        experts: int32, of any shape, less than `num_experts`.
        num_experts: The number of experts.
    """
    flat = tf.reshape(experts, [-1])
    return tf.math.unsorted_segment_sum(tf.ones_like(flat), flat, num_experts)


def sort_by_expert(
    experts: tf.Tensor,
    num_experts: int,
    *,
    is_there: tf.Tensor | None = None,
    capacity: tf.Tensor | None = None,
    gates: tf.Tensor | None = None,
) -> Permutation:
    """Sorts choices by expert; those of one expert keep the order of tokens.

    On a rank with a GPU this is done by the host, which needs the number of rows of each expert for the exchange: it waits
    once for the choices.

    Args:
        experts: int32, [tokens, top_k].
        num_experts: The number of experts.
        is_there: Whether these tokens are routed at all: a bool scalar; None for yes.
        capacity: The maximum number of rows of an expert, which keeps those with the largest gates; None
            for no limit.
        gates: float32, [tokens, top_k]; required with a capacity.
    """
    with devices.on_host():
        flat = tf.reshape(experts, [-1])
        if is_there is not None:
            flat = tf.where(is_there, flat, num_experts)
        if capacity is not None:
            flat = _within_capacity(flat, tf.reshape(gates, [-1]), num_experts, capacity)
        counts = count_by_expert(flat, num_experts + 1)[:num_experts]
        order = tf.argsort(flat, stable=True)
        places = tf.reshape(tf.math.invert_permutation(order), tf.shape(experts))
        places.set_shape(experts.shape)
        if is_there is None and capacity is None:
            return Permutation(order, places, counts, None)
        kept = tf.reshape(flat < num_experts, tf.shape(experts))
        kept.set_shape(experts.shape)
        order = order[: tf.reduce_sum(counts)]
        return Permutation(order, tf.where(kept, places, 0), counts, kept)


def _within_capacity(flat, gates, num_experts: int, capacity):
    """The experts of choices; `num_experts` for those beyond the capacity."""
    by_gate = tf.argsort(gates, direction="DESCENDING", stable=True)
    order = tf.gather(by_gate, tf.argsort(tf.gather(flat, by_gate), stable=True))
    sorted_experts = tf.gather(flat, order)
    begins = tf.searchsorted(sorted_experts, tf.range(num_experts + 1))
    place = tf.range(tf.size(flat)) - tf.gather(begins, sorted_experts)
    kept = tf.where(place < capacity, sorted_experts, num_experts)
    return tf.gather(kept, tf.math.invert_permutation(order))


def gather_rows(tokens: tf.Tensor, permutation: Permutation) -> tf.Tensor:
    """Tokens [tokens, width] as rows [rows, width] in the order of experts."""

    @custom_gradient
    def gather(x):
        def gradient(dy):
            return tf.add_n([_rows_of(dy, permutation, p) for p in range(permutation.top_k)])

        return tf.gather(x, permutation.tokens), gradient

    return gather(tokens)


def combine(rows: tf.Tensor, gates: tf.Tensor, permutation: Permutation) -> tf.Tensor:
    """Computes for each token the sum of its experts' outputs, times their gates.

    Args:
        rows: [rows, width], in the order of experts.
        gates: float32, [tokens, top_k].
        permutation: The order of the rows.

    Returns:
        [tokens, width], of the dtype of `rows`.
    """
    top_k = permutation.top_k

    @custom_gradient
    def weigh(rows, gates):
        def gradient(dy):
            dy = tf.cast(dy, gates.dtype)
            each = tf.gather(tf.reshape(gates, [-1]), permutation.choices)
            d_rows = tf.gather(dy, permutation.tokens) * each[:, None]
            d_gates = [
                tf.reduce_sum(dy * tf.cast(_rows_of(rows, permutation, place), dy.dtype), axis=-1)
                for place in range(top_k)
            ]
            return tf.cast(d_rows, rows.dtype), tf.stack(d_gates, axis=1)

        parts = [
            tf.cast(_rows_of(rows, permutation, place), gates.dtype) * gates[:, place, None]
            for place in range(top_k)
        ]
        return tf.cast(tf.add_n(parts), rows.dtype), gradient

    return weigh(rows, gates)


def _rows_of(rows, permutation: Permutation, place: int):
    """The row of each token's expert at a place; zeros for choices without a row."""
    numbers = permutation.rows[:, place]
    if permutation.kept is None:
        return tf.gather(rows, numbers)
    # If no choice has a row, there is no row 0 for `gather`.
    width = rows.shape[1]
    some = tf.cond(tf.shape(rows)[0] == 0, lambda: tf.zeros([1, width], rows.dtype), lambda: rows)
    found = tf.gather(some, numbers)
    return tf.where(permutation.kept[:, place, None], found, tf.zeros([], found.dtype))
