"""Attention of one block of queries to one block of keys, its gradients, and how results merge.

Softmax over a row of scores is a weighted mean of softmaxes over parts of the row; the weights follow
from the parts' log-sum-exp. So a part of the keys can be attended to wherever it is at hand: a block
of a rank's own keys, or what another rank sends.

Source: Rabe & Staats 2021, "Self-attention Does Not Need O(n^2) Memory"; Dao 2023, "FlashAttention-2".
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.kernels import kernels, kernels_enabled

#: What is added to a score that does not count. Finite, so that a row of them has no NaN, and far
#: below any score. It leaves room for a score beside it.
LOWEST = -1e38


def attend_block(query, key, value, *, bias=None, soft_cap: float | None = None):
    """Attends to the keys of one block.

    Args:
        query: Shape [..., rows, size], of float32 or float64, scaled.
        key: Shape [..., columns, size].
        value: Shape [..., columns, value_size].
        bias: None, or what is added to scores, broadcastable to [..., rows, columns]: 0 where a row
            sees a column, and `LOWEST` elsewhere.
        soft_cap: None, or c: scores s become c tanh(s / c).

    Returns:
        What each row attends to, of shape [..., rows, value_size]: zeros where it sees no column.
        The log-sum-exp of its scores, of shape [..., rows, 1]: -inf there.
    """
    scores, _ = _scores(query, key, bias, soft_cap)
    weights, lse = _softmax(scores)
    out = tf.matmul(weights, value)
    if bias is None:
        return out, lse
    sees = lse > LOWEST / 2
    minus_infinity = tf.constant(float("-inf"), lse.dtype)
    return tf.where(sees, out, 0.0), tf.where(sees, lse, minus_infinity)


def merge(first, second):
    """Puts together what the same rows attend to in two sets of keys.

    Args:
        first: The output [..., rows, value_size] and the log-sum-exp [..., rows, 1] of one set.
        second: Those of the other.

    Returns:
        Those of both sets together.
    """
    (out, lse), (other, other_lse) = first, second
    highest = tf.maximum(lse, other_lse)
    # Rows that see nothing in either set: -inf less -inf would be NaN.
    highest = tf.where(tf.math.is_inf(highest), tf.zeros_like(highest), highest)
    weight, other_weight = tf.exp(lse - highest), tf.exp(other_lse - highest)
    total = weight + other_weight
    out = out * tf.math.divide_no_nan(weight, total)
    out += other * tf.math.divide_no_nan(other_weight, total)
    return out, highest + tf.math.log(total)


def block_gradients(
    query, key, value, gradient, lse, delta, *, bias=None, soft_cap: float | None = None
):
    """The gradients of one block's queries, keys and values, by what the rows see in all blocks.

    Args:
        query: As in `attend_block`.
        key: As there.
        value: As there.
        gradient: Of the output of all blocks together, of shape [..., rows, value_size].
        lse: The log-sum-exp over all blocks, of shape [..., rows, 1].
        delta: The sum of `gradient` times that output over the last dim, less the gradient of `lse`,
            of shape [..., rows, 1].
        bias: As in `attend_block`.
        soft_cap: As there.

    Returns:
        This block's addend to the gradients of the (scaled) query, the key and the value.
    """
    scores, slope = _scores(query, key, None, soft_cap)
    exponents = scores - finite(lse)
    weight_gradient = tf.matmul(gradient, value, transpose_b=True) - delta
    return gradients_of_products(
        query, key, gradient, exponents, weight_gradient, bias=bias, slope=slope
    )


def gradients_of_products(
    query, key, gradient, exponents, weight_gradient, *, bias=None, slope=None
):
    """The second half of `block_gradients`.

    Args:
        query: As there.
        key: As there.
        gradient: As there.
        exponents: Scores less `lse`, of shape [..., rows, columns].
        weight_gradient: `gradient` times the values less `delta`, of that shape.
        bias: As there.
        slope: None, or that of the cap at each score.

    Returns:
        As there.
    """
    exponents = exponents if bias is None else exponents + bias
    if _takes_kernels(exponents):
        weights, score_gradient = kernels().tfdist_softmax_gradient(
            exponents=exponents, dy=weight_gradient
        )
    else:
        weights = tf.exp(exponents)
        score_gradient = weights * weight_gradient
    value_gradient = tf.matmul(weights, gradient, transpose_a=True)
    if slope is not None:
        score_gradient *= slope
    query_gradient = tf.matmul(score_gradient, key)
    key_gradient = tf.matmul(score_gradient, query, transpose_a=True)
    return query_gradient, key_gradient, value_gradient


def finite(lse):
    """0 for rows that see nothing, all of whose scores are far below."""
    return tf.where(tf.math.is_inf(lse), tf.zeros_like(lse), lse)


def _takes_kernels(scores) -> bool:
    """Whether the compiled library, which goes over the scores once, takes them."""
    return scores.dtype == tf.float32 and kernels_enabled()


def _softmax(scores):
    """The softmax of rows, and their log-sum-exp."""
    if _takes_kernels(scores):
        return kernels().tfdist_softmax(scores=scores)
    weights = tf.nn.softmax(scores)
    # The weight of the highest score is 1 over the sum of exponentials: no second pass of those.
    highest = tf.reduce_max(scores, axis=-1, keepdims=True)
    return weights, highest - tf.math.log(tf.reduce_max(weights, axis=-1, keepdims=True))


def _scores(query, key, bias, soft_cap: float | None):
    """Scores, and the slope of the cap at each; None without a cap."""
    scores = tf.matmul(query, key, transpose_b=True)
    slope = None
    if soft_cap is not None:
        capped = tf.tanh(scores / soft_cap)
        scores, slope = capped * soft_cap, 1.0 - tf.square(capped)
    if bias is not None:
        scores += bias
    return scores, slope
