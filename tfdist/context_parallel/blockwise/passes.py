"""The forward and the backward pass of attention over all pairs of blocks.

The loops are `tf.while_loop`s of one iteration at a time: if all blocks were in one graph, TensorFlow would
start all of them at once, and their scores would be in memory together.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdist.backend import devices
from tfdist.context_parallel.blockwise.blocks import (
    attend_block,
    block_gradients,
    finite,
    merge,
    product,
    scores_of,
)
from tfdist.context_parallel.blockwise.grid import Grid, Settings, Visibility


def attention_parts(query, key, value, seen: Visibility, settings: Settings):
    """Computes the forward pass.

    Args:
        query: Shape [batch, heads, queries, size].
        key: Shape [batch, groups, keys, size]; `heads` is a multiple of `groups`.
        value: Shape [batch, groups, keys, value_size].
        seen: Which of these keys the queries see.
        settings: The other settings.

    Returns:
        The output, of shape [batch, heads, queries, value_size], and the log-sum-exp of scores, of shape
        [batch, heads, queries, 1]; both float32, or float64 if the query is. They are for these keys only:
        `merge` combines the results for several sets of keys.
    """
    grid = Grid(query, key, seen, settings)
    dtype, narrow = grid.dtype, grid.narrow
    queries = grid.rows.blocks(query)
    keys, values = grid.columns.blocks(key), grid.columns.blocks(value)

    def row(i, outs, lses):
        scaled = tf.cast(queries(i), narrow) * settings.scale

        def pair(j, *found):
            key, value = tf.cast(keys(j), narrow), tf.cast(values(j), narrow)
            again = grid.with_bias(
                i,
                j,
                lambda bias: attend_block(
                    scaled, key, value, bias=bias, soft_cap=settings.soft_cap
                ),
                lambda: _nothing(scaled, value.shape[-1], dtype),
            )
            return merge(found, again) if found else again

        out, lse = _nothing(scaled, value.shape[-1], dtype)
        seen_columns = grid.columns_seen(i)
        if isinstance(seen_columns, int) and seen_columns == 1:
            out, lse = pair(0)
        else:
            out, lse = _loop(0, seen_columns, pair, (out, lse))
        return outs.write(i, out), lses.write(i, lse)

    empty = [tf.TensorArray(dtype, grid.rows.number) for _ in range(2)]
    outs, lses = _loop(0, grid.rows.number, row, tuple(empty))
    return grid.rows.joined(outs, value.shape[-1]), grid.rows.joined(lses, 1)


def attention_gradients(
    query, key, value, gradient, lse, delta, seen: Visibility, settings: Settings
):
    """Computes the backward pass, with the scores computed again.

    Args:
        query: As in `attention_parts`.
        key: As in `attention_parts`.
        value: As in `attention_parts`.
        gradient: The gradient of the output, of its shape.
        lse: The log-sum-exp over all keys, also those of other calls: [batch, heads, queries, 1].
        delta: The sum of `gradient` times the output over all keys along the last dim, minus the
            gradient of `lse`; of its shape.
        seen: As in `attention_parts`.
        settings: As in `attention_parts`.

    Returns:
        The gradients of query, key and value, float32 or float64. With several sets of keys, the gradient
        of the query is the sum over the sets.
    """
    grid = Grid(query, key, seen, settings)
    dtype = grid.dtype
    query, key, value, gradient = (
        tf.cast(tensor, grid.narrow) for tensor in (query, key, value, gradient)
    )
    lse, delta = tf.cast(lse, dtype), tf.cast(delta, dtype)
    query *= settings.scale
    # By block: query and gradient; key. Then the factors of the products of a pair.
    rows, columns = [query, gradient], [key]
    if settings.soft_cap is None and _products_are_exact(dtype):
        compute = _folded_pair
        ones = tf.ones_like(key[..., :1])
        rows += [tf.concat([query, -finite(lse)], -1), tf.concat([gradient, -delta], -1)]
        columns += [tf.concat([key, ones], -1), tf.concat([value, ones], -1)]
    else:
        compute = functools.partial(_pair, soft_cap=settings.soft_cap)
        rows += [lse, delta]
        columns += [value]
    is_one = grid.columns.is_whole
    row_blocks = [grid.rows.blocks(tensor) for tensor in rows]
    column_blocks = [grid.columns.blocks(tensor) for tensor in columns]

    def column(j, query_gradients, key_gradients, value_gradients):
        of_column = [blocks(j) for blocks in column_blocks]
        key, value = of_column[0], of_column[-1][..., :value_size]

        def pair(i, query_gradients, key_gradient, value_gradient):
            of_row = [blocks(i) for blocks in row_blocks]
            of_query, of_key, of_value = grid.with_bias(
                i,
                j,
                lambda bias: compute(of_row, of_column, bias),
                lambda: tuple(tf.zeros_like(x, dtype) for x in (of_row[0], key, value)),
            )
            if not is_one:
                of_query += query_gradients.read(i)
            query_gradients = query_gradients.write(i, of_query)
            return query_gradients, key_gradient + of_key, value_gradient + of_value

        query_gradients, of_key, of_value = _loop(
            grid.first_row(j),
            grid.rows.number,
            pair,
            (query_gradients, tf.zeros_like(key, dtype), tf.zeros_like(value, dtype)),
        )
        return query_gradients, key_gradients.write(j, of_key), value_gradients.write(j, of_value)

    size, value_size = query.shape[-1], value.shape[-1]
    begin = tf.TensorArray(dtype, grid.rows.number, clear_after_read=False)
    if not is_one:
        begin = begin.unstack(tf.zeros(grid.rows.shape(size), dtype))
    empty = [tf.TensorArray(dtype, grid.columns.number) for _ in range(2)]
    of_queries, of_keys, of_values = _loop(0, grid.columns.number, column, (begin, *empty))
    return (
        grid.rows.joined(of_queries, size) * settings.scale,
        grid.columns.joined(of_keys, size),
        grid.columns.joined(of_values, value_size),
    )


def _pair(of_row, of_column, bias, soft_cap):
    query, gradient, lse, delta = of_row
    key, value = of_column
    scores, slope = scores_of(query, key, None, soft_cap)
    weight_gradient = product(gradient, value, transpose_b=True) - delta
    exponents = scores - finite(lse)
    return block_gradients(query, key, gradient, exponents, weight_gradient, bias=bias, slope=slope)


def _folded_pair(of_row, of_column, bias):
    """The same with `lse` and `delta` as one more feature of the products: saves two passes over all scores."""
    query, gradient, query_and_lse, gradient_and_delta = of_row
    key, key_and_one, value_and_one = of_column
    exponents = tf.matmul(query_and_lse, key_and_one, transpose_b=True)
    weight_gradient = tf.matmul(gradient_and_delta, value_and_one, transpose_b=True)
    return block_gradients(query, key, gradient, exponents, weight_gradient, bias=bias)


def _products_are_exact(dtype) -> bool:
    """Whether products keep the precision of their factors, which GPUs with TensorFloat-32 do not."""
    return dtype == tf.float64 or not devices.has_gpu()


def _nothing(query, value_size: int, dtype):
    """The result for an empty set of keys."""
    out = tf.zeros_like(query[..., :1], dtype)
    lse = tf.fill(tf.shape(out), tf.constant(float("-inf"), dtype))
    lse.set_shape(out.shape)
    return tf.repeat(out, value_size, axis=-1), lse


def _loop(begin, end, body, carried: tuple) -> Any:
    """Calls `body(index, *carried)` for each index in turn; returns the last values of `carried`."""
    if isinstance(begin, int) and isinstance(end, int) and end - begin <= 1:
        for index in range(begin, end):
            carried = body(index, *carried)
        return carried
    _, *carried = tf.while_loop(
        lambda index, *_: index < end,
        lambda index, *carried: (index + 1, *body(index, *carried)),
        (begin, *carried),
        parallel_iterations=1,
    )
    return carried
