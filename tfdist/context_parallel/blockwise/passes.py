"""The forward and the backward pass of attention over all pairs of blocks.

The loops are `tf.while_loop`s of one iteration at a time: with the blocks side by side in a graph,
TensorFlow would begin all of them at once, and their scores would stand together.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import tensorflow as tf

from tfdist.context_parallel.blockwise.blocks import (
    attend_block,
    block_gradients,
    finite,
    gradients_of_products,
    merge,
)
from tfdist.context_parallel.blockwise.grid import Cut, Grid, Visibility, size_of


class Settings(NamedTuple):
    """What attention computes, beside what is seen.

    Attributes:
        scale: What scores are multiplied by.
        soft_cap: None, or c: scores s become c tanh(s / c).
        rows: The most queries of a block.
        columns: The most keys of a block.
    """

    scale: float
    soft_cap: float | None
    rows: int
    columns: int


def attention_parts(query, key, value, seen: Visibility, settings: Settings):
    """The forward pass.

    Args:
        query: Shape [batch, heads, queries, size].
        key: Shape [batch, groups, keys, size], where the groups divide the heads.
        value: Shape [batch, groups, keys, value_size].
        seen: What queries see of these keys.
        settings: What is computed.

    Returns:
        What is attended to, of shape [batch, heads, queries, value_size], and the log-sum-exp of
        scores, of shape [batch, heads, queries, 1]; both of float32, or float64 as the query. They
        are of these keys alone: `merge` puts results for several sets of keys together.
    """
    grid, groups, dtype = _grid(query, key, seen, settings)
    queries = grid.rows.blocks(query, groups)
    keys, values = grid.columns.blocks(key), grid.columns.blocks(value)

    def row(i, outs, lses):
        scaled = tf.cast(queries.read(i), dtype) * settings.scale

        def pair(j, *found):
            key, value = tf.cast(keys.read(j), dtype), tf.cast(values.read(j), dtype)
            again = grid.with_bias(
                i,
                j,
                lambda bias: attend_block(
                    scaled, key, value, bias=bias, soft_cap=settings.soft_cap
                ),
                lambda: _nothing(scaled, value.shape[-1]),
            )
            return merge(found, again) if found else again

        out, lse = _nothing(scaled, value.shape[-1])
        seen_columns = grid.columns_seen(i)
        if isinstance(seen_columns, int) and seen_columns == 1:
            out, lse = pair(0)
        else:
            out, lse = _loop(0, seen_columns, pair, (out, lse))
        return outs.write(i, out), lses.write(i, lse)

    empty = [tf.TensorArray(dtype, grid.rows.number) for _ in range(2)]
    outs, lses = _loop(0, grid.rows.number, row, tuple(empty))
    batch, heads = size_of(query, 0), query.shape[1]
    return (
        grid.rows.joined(outs, batch, heads, groups, value.shape[-1]),
        grid.rows.joined(lses, batch, heads, groups, 1),
    )


def attention_gradients(
    query, key, value, gradient, lse, delta, seen: Visibility, settings: Settings
):
    """The backward pass, which makes the scores again.

    Args:
        query: As in `attention_parts`.
        key: As there.
        value: As there.
        gradient: Of the output, of its shape.
        lse: The log-sum-exp over all keys, also those of other calls: [batch, heads, queries, 1].
        delta: The sum of `gradient` times the output over all keys along the last dim, less the
            gradient of `lse`; of its shape.
        seen: As in `attention_parts`.
        settings: As there.

    Returns:
        The gradients of query, key and value, of float32 or float64. With several sets of keys, the
        query's is the sum of what each set gives.
    """
    grid, groups, dtype = _grid(query, key, seen, settings)
    query, key, value, gradient, lse, delta = (
        tf.cast(tensor, dtype) for tensor in (query, key, value, gradient, lse, delta)
    )
    query *= settings.scale
    # By block: query and gradient; key. Then what the products of a pair are made of.
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
    row_blocks = [grid.rows.blocks(tensor, groups) for tensor in rows]
    column_blocks = [grid.columns.blocks(tensor) for tensor in columns]

    def column(j, query_gradients, key_gradients, value_gradients):
        of_column = [blocks.read(j) for blocks in column_blocks]
        key, value = of_column[0], of_column[-1][..., :value_size]

        def pair(i, query_gradients, key_gradient, value_gradient):
            of_row = [blocks.read(i) for blocks in row_blocks]
            of_query, of_key, of_value = grid.with_bias(
                i,
                j,
                lambda bias: compute(of_row, of_column, bias),
                lambda: (tf.zeros_like(of_row[0]), tf.zeros_like(key), tf.zeros_like(value)),
            )
            if not is_one:
                of_query += query_gradients.read(i)
            query_gradients = query_gradients.write(i, of_query)
            return query_gradients, key_gradient + of_key, value_gradient + of_value

        query_gradients, of_key, of_value = _loop(
            grid.first_row(j),
            grid.rows.number,
            pair,
            (query_gradients, tf.zeros_like(key), tf.zeros_like(value)),
        )
        return query_gradients, key_gradients.write(j, of_key), value_gradients.write(j, of_value)

    size, value_size = query.shape[-1], value.shape[-1]
    batch, heads = size_of(query, 0), query.shape[1]
    begin = tf.TensorArray(dtype, grid.rows.number, clear_after_read=False)
    if not is_one:
        block = [batch, groups, heads // groups * grid.rows.size, size]
        begin = begin.unstack(tf.zeros([grid.rows.number, *block], dtype))
    empty = [tf.TensorArray(dtype, grid.columns.number) for _ in range(2)]
    of_queries, of_keys, of_values = _loop(0, grid.columns.number, column, (begin, *empty))
    of_query = grid.rows.joined(of_queries, batch, heads, groups, size) * settings.scale
    of_key = grid.columns.joined(of_keys, batch, groups, groups, size)
    return of_query, of_key, grid.columns.joined(of_values, batch, groups, groups, value_size)


def _pair(of_row, of_column, bias, soft_cap):
    query, gradient, lse, delta = of_row
    key, value = of_column
    return block_gradients(query, key, value, gradient, lse, delta, bias=bias, soft_cap=soft_cap)


def _folded_pair(of_row, of_column, bias):
    """With `lse` and `delta` as one more feature of products: two passes less over all scores."""
    query, gradient, query_and_lse, gradient_and_delta = of_row
    key, key_and_one, value_and_one = of_column
    exponents = tf.matmul(query_and_lse, key_and_one, transpose_b=True)
    weight_gradient = tf.matmul(gradient_and_delta, value_and_one, transpose_b=True)
    return gradients_of_products(query, key, gradient, exponents, weight_gradient, bias=bias)


def _products_are_exact(dtype) -> bool:
    """Whether products keep the precision of their factors: not where GPUs take TensorFloat-32."""
    return dtype == tf.float64 or not tf.config.list_logical_devices("GPU")


def _grid(query, key, seen: Visibility, settings: Settings):
    dtype = tf.float64 if query.dtype == tf.float64 else tf.float32
    rows = Cut(size_of(query, 2), settings.rows)
    columns = Cut(size_of(key, 2), settings.columns)
    groups = key.shape[1]
    return Grid(rows, columns, query.shape[1], groups, seen, dtype), groups, dtype


def _nothing(query, value_size: int):
    """The result for no keys at all."""
    out = tf.zeros_like(query[..., :1])
    lse = tf.fill(tf.shape(out), tf.constant(float("-inf"), query.dtype))
    lse.set_shape(out.shape)
    return tf.repeat(out, value_size, axis=-1), lse


def _loop(begin, end, body, carried: tuple) -> Any:
    """Calls `body(index, *carried)` for each index, one after the other; returns what is carried."""
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
