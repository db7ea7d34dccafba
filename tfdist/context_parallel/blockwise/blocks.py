"""Attention of one block of queries to one block of keys, its gradients, and the merge of results.

Softmax over a row of scores is a weighted mean of softmaxes over parts of the row; the weights follow
from the parts' log-sum-exp. So attention can be computed for any part of the keys: a block of a rank's
own keys, or keys that another rank sends.

Source: Rabe & Staats 2021, "Self-attention Does Not Need O(n^2) Memory"; Dao 2023, "FlashAttention-2".
"""

from __future__ import annotations

import tensorflow as tf

from tfdist.backend.kernels import kernels, kernels_enabled

#: Added to a score that is masked. Finite, so that a row of them has no NaN; far below any score; and far
#: enough from the float32 minimum that the sum with a score does not overflow.
LOWEST = -1e38


def attend_block(query, key, value, *, bias=None, soft_cap: float | None = None):
    """Attends to the keys of one block.

    Args:
        query: Shape [..., rows, size], scaled.
        key: Shape [..., columns, size].
        value: Shape [..., columns, value_size].
        bias: None, or an addend of scores, broadcastable to [..., rows, columns]: 0 where a row sees a
            column, and `LOWEST` elsewhere.
        soft_cap: None, or c: scores s become c tanh(s / c).

    Returns:
        The output of each row, of shape [..., rows, value_size]: zero if the row sees no column. And the
        log-sum-exp of its scores, of shape [..., rows, 1]: then -inf.
    """
    scores, _ = scores_of(query, key, bias, soft_cap)
    weights, lse = _softmax(scores)
    out = product(weights, value)
    if bias is None:
        return out, lse
    sees = lse > LOWEST / 2
    minus_infinity = tf.constant(float("-inf"), lse.dtype)
    return tf.where(sees, out, 0.0), tf.where(sees, lse, minus_infinity)


def merge(first, second):
    """Merges the results of the same rows for two sets of keys.

    Args:
        first: The output [..., rows, value_size] and the log-sum-exp [..., rows, 1] for one set.
        second: The same for the other set.

    Returns:
        The output and the log-sum-exp for both sets together.
    """
    (out, lse), (other, other_lse) = first, second
    highest = tf.maximum(lse, other_lse)
    # For rows that see nothing in either set: -inf minus -inf would be NaN.
    highest = tf.where(tf.math.is_inf(highest), tf.zeros_like(highest), highest)
    weight, other_weight = tf.exp(lse - highest), tf.exp(other_lse - highest)
    total = weight + other_weight
    out = out * tf.math.divide_no_nan(weight, total)
    out += other * tf.math.divide_no_nan(other_weight, total)
    return out, highest + tf.math.log(total)


def block_gradients(query, key, gradient, exponents, weight_gradient, *, bias=None, slope=None):
    """The gradients of one block's queries, keys and values.

    Args:
        query: As in `attend_block`.
        key: As in `attend_block`.
        gradient: Of the output of all blocks together, of shape [..., rows, value_size].
        exponents: Scores minus the log-sum-exp over all blocks, of shape [..., rows, columns].
        weight_gradient: `gradient` times the values, minus delta: the sum of `gradient` times the output
            of all blocks over the last dim, minus the gradient of the log-sum-exp. Of the same shape.
        bias: As in `attend_block`.
        slope: None, or the slope of the cap at each score.

    Returns:
        The contribution of this block to the gradients of the (scaled) query, the key and the value.
    """
    exponents = exponents if bias is None else exponents + bias
    if _kernels_apply(exponents):
        weights, score_gradient = kernels().tfdist_softmax_gradient(
            exponents=exponents, dy=weight_gradient
        )
    else:
        weights = tf.exp(exponents)
        score_gradient = weights * weight_gradient
    value_gradient = product(weights, gradient, transpose_a=True)
    if slope is not None:
        score_gradient *= slope
    query_gradient = product(score_gradient, key)
    key_gradient = product(score_gradient, query, transpose_a=True)
    return query_gradient, key_gradient, value_gradient


def product(first, second, **transposed) -> tf.Tensor:
    """A product of factors in the narrower of their dtypes; of 16-bit factors it is cast to float32."""
    narrow = min(first.dtype, second.dtype, key=lambda dtype: dtype.size)
    found = tf.matmul(tf.cast(first, narrow), tf.cast(second, narrow), **transposed)
    return tf.cast(found, tf.float32) if narrow.size < tf.float32.size else found


def finite(lse):
    """The log-sum-exp, with 0 for rows that see nothing: their biased scores are far below 0."""
    return tf.where(tf.math.is_inf(lse), tf.zeros_like(lse), lse)


def _kernels_apply(scores) -> bool:
    """Whether the compiled library is used, which needs one pass over the scores."""
    return scores.dtype == tf.float32 and kernels_enabled()


def _softmax(scores):
    """The softmax of each row, and its log-sum-exp."""
    if _kernels_apply(scores):
        return kernels().tfdist_softmax(scores=scores)
    weights = tf.nn.softmax(scores)
    # The weight of the highest score is 1 over the sum of exponentials: no second pass of those.
    highest = tf.reduce_max(scores, axis=-1, keepdims=True)
    return weights, highest - tf.math.log(tf.reduce_max(weights, axis=-1, keepdims=True))


def scores_of(query, key, bias, soft_cap: float | None):
    """Scores, and the slope of the cap at each; None without a cap."""
    scores = product(query, key, transpose_b=True)
    slope = None
    if soft_cap is not None:
        capped = tf.tanh(scores / soft_cap)
        scores, slope = capped * soft_cap, 1.0 - tf.square(capped)
    if bias is not None:
        scores += bias
    return scores, slope
