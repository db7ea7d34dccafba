"""Blockwise attention gives what softmax attention gives, and never holds all scores."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.context_parallel.blockwise import (
    Visibility,
    attend_block,
    attention_gradients,
    attention_parts,
    merge,
    passes,
)
from tfdist.context_parallel.blockwise import attention as blockwise
from tfdist.context_parallel.blockwise.passes import Settings
from tfdist.layers import ParallelMultiHeadAttention, attention, blockwise_attention
from tfdist.recompute import recompute

_TOLERANCE = 1e-5


def slow(*values):
    """A case for `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def dense(query, key, value, *, causal=False, query_offset=None, mask=None, scale=None, cap=None):
    """Softmax attention by its formula; rows that see nothing give zeros. With the log-sum-exp."""
    repeats = query.shape[1] // key.shape[1]
    key, value = tf.repeat(key, repeats, axis=1), tf.repeat(value, repeats, axis=1)
    scores = tf.matmul(query, key, transpose_b=True)
    scores *= query.shape[-1] ** -0.5 if scale is None else scale
    if cap is not None:
        scores = cap * tf.tanh(scores / cap)
    rows, columns = tf.shape(scores)[2], tf.shape(scores)[3]
    seen = tf.ones_like(scores, tf.bool)
    if mask is not None:
        seen = tf.logical_and(seen, mask)
    if causal:
        offset = columns - rows if query_offset is None else query_offset
        seen &= tf.range(columns)[None, :] <= tf.range(rows)[:, None] + offset
    some = tf.reduce_any(seen, axis=-1, keepdims=True)
    scores = tf.where(seen, scores, -1e30)
    weights = tf.where(some, tf.nn.softmax(scores), 0.0)
    lse = tf.where(some[..., 0], tf.reduce_logsumexp(scores, axis=-1), 0.0)
    return tf.matmul(weights, value), lse


def tensors(*shape, key_heads=None, key_time=None, value_size=None, dtype="float32", seed=0):
    """Query, key, value, and gradients for output and log-sum-exp."""
    batch, heads, time, size = shape
    random = np.random.default_rng(seed)

    def draw(*dims):
        return tf.constant(random.standard_normal(dims), dtype)

    key_shape = (batch, key_heads or heads, time if key_time is None else key_time)
    value_size = value_size or size
    return (
        draw(batch, heads, time, size),
        draw(*key_shape, size),
        draw(*key_shape, value_size),
        draw(batch, heads, time, value_size),
        tf.cast(draw(batch, heads, time), "float64" if dtype == "float64" else "float32"),
    )


def results(attention, query, key, value, of_out, of_lse):
    """Output, log-sum-exp (0 where it is -inf), and the gradients of the inputs by both."""
    with tf.GradientTape() as tape:
        tape.watch([query, key, value])
        out, lse = attention(query, key, value)
        lse = tf.where(tf.math.is_inf(lse), 0.0, lse)
        total = tf.reduce_sum(tf.cast(out * of_out, tf.float64))
        total += tf.reduce_sum(tf.cast(lse * tf.cast(of_lse, lse.dtype), tf.float64))
    return [out, lse, *tape.gradient(total, [query, key, value])]


def assert_same(found, expected, tolerance=_TOLERANCE):
    for name, one, other in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(tf.cast(one, tf.float64)),
            np.asarray(tf.cast(other, tf.float64)),
            rtol=tolerance,
            atol=tolerance,
            err_msg=name,
        )


def compare(data, *, block_size, graph=True, tolerance=_TOLERANCE, **options):
    def blockwise(query, key, value):
        named = dict(options)
        named["soft_cap"] = named.pop("cap", None)
        return blockwise_attention(
            query, key, value, block_size=block_size, return_lse=True, **named
        )

    expected = results(lambda *parts: dense(*parts, **options), *data)
    run = tf.function(results) if graph else results
    assert_same(run(blockwise, *data), expected, tolerance)


_SHAPES = {
    "even": ((2, 4, 32, 8), {}),
    "odd": ((2, 3, 37, 8), {}),
    "one query, many keys": ((2, 4, 1, 8), {"key_time": 37}),
    "few queries": ((1, 2, 5, 8), {"key_time": 37}),
    "fewer keys than queries": ((1, 2, 37, 8), {"key_time": 20}),
    "grouped": ((2, 6, 21, 8), {"key_heads": 2}),
    "one key head": ((2, 4, 21, 8), {"key_heads": 1, "key_time": 40}),
    "other size of values": ((2, 4, 21, 8), {"value_size": 5}),
    "one token": ((1, 1, 1, 1), {}),
}


@pytest.mark.parametrize(
    ("causal", "block_size"),
    [
        (False, 8),
        (True, (5, 16)),
        *[slow(causal, size) for causal in (False, True) for size in ((16, 5), 64, 1)],
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", _SHAPES)
def test_gives_what_the_formula_gives(shape, block_size, causal):
    dims, options = _SHAPES[shape]
    if block_size == 1 and dims[2] > 30:
        pytest.skip("too many blocks")
    compare(tensors(*dims, **options), block_size=block_size, causal=causal)


def _mask(*shape):
    return tf.constant(np.random.default_rng(1).random(shape) < 0.6)


@pytest.mark.parametrize(
    "mask_shape",
    [
        (2, 1, 1, 29),
        (2, 6, 21, 29),
        (21, 29),
        *[slow(shape) for shape in ((2, 1, 21, 29), (1, 6, 1, 29), (1, 1, 21, 1), (29,))],
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("causal", "key_heads"),
    [(False, 2), (True, 6), slow(True, 2), slow(False, 6), slow(False, 1), slow(True, 1)],
)
def test_masks(mask_shape, causal, key_heads):
    data = tensors(2, 6, 21, 8, key_heads=key_heads, key_time=29)
    compare(data, block_size=8, causal=causal, mask=_mask(*mask_shape))


@pytest.mark.parametrize("offset", [slow(-30), -3, slow(0), slow(2), 11, slow(60)])
def test_query_offset(offset):
    data = tensors(2, 2, 19, 8, key_time=30)
    compare(data, block_size=4, causal=True, query_offset=offset)
    compare(data, block_size=(8, 3), causal=True, query_offset=tf.constant(offset))


def test_soft_cap_and_scale():
    data = tensors(2, 4, 21, 8, key_heads=2)
    compare(data, block_size=8, causal=True, cap=2.0, scale=0.7)
    compare(data, block_size=8, cap=2.0, mask=_mask(2, 1, 1, 21))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_eager(causal):
    compare(tensors(2, 4, 21, 8, key_heads=2), block_size=8, causal=causal, graph=False)


@pytest.mark.parametrize("causal", [slow(False), True], ids=["full", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_unknown_batch_and_time(causal, masked):
    unknown = tf.TensorSpec([None, 4, None, 8])
    grouped = tf.TensorSpec([None, 2, None, 8])
    vector = tf.TensorSpec([None, 4, None])
    mask_spec = tf.TensorSpec([None, 1, None, None], tf.bool)

    @tf.function(input_signature=[unknown, grouped, grouped, unknown, vector, mask_spec])
    def run(query, key, value, of_out, of_lse, mask):
        return results(
            lambda *parts: blockwise_attention(
                *parts, causal=causal, mask=mask if masked else None, block_size=8, return_lse=True
            ),
            *(query, key, value, of_out, of_lse),
        )

    for batch, time in ((2, 21), (1, 8), (3, 1), (2, 40)):
        data = tensors(batch, 4, time, 8, key_heads=2)
        for mask in (_mask(batch, 1, 1, time), _mask(batch, 1, time, time)):
            expected = results(
                lambda *parts, mask=mask: dense(
                    *parts, causal=causal, mask=mask if masked else None
                ),
                *data,
            )
            assert_same(run(*data, mask), expected)


def test_no_rows_of_the_batch():
    data = tensors(0, 4, 21, 8)
    found = tf.function(results)(
        lambda *parts: blockwise_attention(*parts, causal=True, block_size=8, return_lse=True),
        *data,
    )
    assert [part.shape[0] for part in found] == [0] * 5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_dtypes(dtype):
    """Nothing is rounded between the inputs and the outputs."""
    narrow = tensors(2, 4, 21, 8, key_heads=2, dtype=dtype)
    wide = [tf.cast(part, tf.float64) for part in narrow]
    expected = results(lambda *parts: dense(*parts, causal=True), *wide)
    found = results(
        lambda *parts: blockwise_attention(*parts, causal=True, block_size=8, return_lse=True),
        *narrow,
    )
    assert [part.dtype.name for part in found] == [
        dtype,
        "float64" if dtype == "float64" else "float32",
        *[dtype] * 3,
    ]
    assert_same(found, expected, {"bfloat16": 2e-2, "float16": 2e-3, "float64": 1e-12}[dtype])


def test_rows_that_see_nothing_are_zeros_without_gradients():
    query, key, value, of_out, of_lse = tensors(2, 4, 21, 8)
    mask = np.ones((2, 1, 21, 21), bool)
    mask[:, :, 3] = False
    mask[1] = False
    out, lse, *gradients = results(
        lambda *parts: blockwise_attention(*parts, mask=mask, block_size=8, return_lse=True),
        *(query, key, value, of_out, of_lse),
    )
    assert not np.any(out[:, :, 3]) and not np.any(out[1])
    assert not np.any(lse[1])
    assert not np.any(gradients[0][:, :, 3])
    assert not any(np.any(gradient[1]) for gradient in gradients)
    assert all(np.all(np.isfinite(part)) for part in (out, lse, *gradients))


def test_large_scores():
    query, key, value, of_out, of_lse = tensors(1, 2, 21, 8)
    compare((query * 300, key * 300, value, of_out, of_lse), block_size=8, tolerance=1e-3)


def test_parts_of_the_keys_merge():
    """As ring attention has it: keys arrive in parts, and the backward pass knows the whole."""
    query, key, value, of_out, of_lse = tensors(2, 4, 24, 8, key_heads=2)
    settings = Settings(8**-0.5, None, 8, 8)
    parts = [(key[:, :, s : s + 12], value[:, :, s : s + 12], -s) for s in (0, 12)]
    out, lse = None, None
    for part_key, part_value, offset in parts:
        found = attention_parts(query, part_key, part_value, Visibility(True, offset), settings)
        out, lse = found if out is None else merge((out, lse), found)
    delta = tf.reduce_sum(out * of_out, -1, keepdims=True) - of_lse[..., None]
    gradients = [
        attention_gradients(
            query, *part[:2], of_out, lse, delta, Visibility(True, part[2]), settings
        )
        for part in parts
    ]
    found = [
        out,
        lse[..., 0],
        sum(part[0] for part in gradients),
        *[tf.concat([part[i] for part in gradients], 2) for i in (1, 2)],
    ]
    expected = results(
        lambda *parts: dense(*parts, causal=True), *(query, key, value, of_out, of_lse)
    )
    assert_same(found, expected)


def test_without_folding(monkeypatch):
    """As on GPUs, whose products may round their factors."""
    monkeypatch.setattr(passes, "_products_are_exact", lambda dtype: False)
    compare(tensors(2, 4, 21, 8, key_heads=2, value_size=5), block_size=8, causal=True)


def test_compiled_by_xla():
    data = tensors(2, 2, 21, 8)

    def blockwise(query, key, value):
        return blockwise_attention(
            query, key, value, causal=True, mask=_mask(2, 1, 1, 21), block_size=8, return_lse=True
        )

    compiled = tf.function(lambda *data: results(blockwise, *data), jit_compile=True)
    assert_same(compiled(*data), results(blockwise, *data))


def test_merging_nothing_with_nothing():
    out, lse = merge(*[(tf.zeros([2, 3]), tf.fill([2, 1], float("-inf")))] * 2)
    assert not np.any(out) and np.all(np.isneginf(lse))


def test_a_block_alone():
    query, key, value, *_ = tensors(2, 4, 21, 8)
    out, lse = attend_block(query, key, value)
    expected = dense(query, key, value, scale=1.0)
    np.testing.assert_allclose(out, expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse[..., 0], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"query": np.ones((1, 2, 3, 4), int)}, TypeError, "floating"),
        ({"query": np.ones((2, 3, 4), "float32")}, ValueError, "batch, heads, time, size"),
        ({"key": np.ones((1, 3, 3, 4), "float32")}, ValueError, "the same number of heads"),
        ({"key": np.ones((1, 2, 3, 5), "float32")}, ValueError, "the same size"),
        ({"key": np.ones((1, 2, 4, 4), "float32")}, ValueError, "the same time"),
        ({"value": np.ones((3, 2, 3, 4), "float32")}, ValueError, "the same batch size"),
        ({"causal": 1}, ValueError, "causal"),
        ({"query_offset": 1}, ValueError, "causal"),
        ({"soft_cap": 0}, ValueError, "soft_cap"),
        ({"scale": float("nan")}, ValueError, "scale"),
        ({"block_size": 0}, ValueError, "block_size"),
        ({"block_size": (1, 2, 3)}, ValueError, "block_size"),
        ({"mask": np.ones((1, 1, 1, 3, 3), bool)}, ValueError, "mask"),
        ({"mask": np.ones((1, 1, 5, 3), bool)}, ValueError, "mask"),
        ({"return_lse": None}, ValueError, "return_lse"),
    ],
)
def test_errors(changes, error, words):
    part = np.ones((1, 2, 3, 4), "float32")
    arguments = {"query": part, "key": part, "value": part} | changes
    parts = [arguments.pop(name) for name in ("query", "key", "value")]
    with pytest.raises(error, match=words):
        blockwise_attention(*parts, **arguments)


@pytest.mark.parametrize("heads", [slow((4, 4)), (4, 2)], ids=["heads", "grouped"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_long_sequences_of_the_attention_layer(heads, masked, recomputed, monkeypatch):
    """By blocks or not, the layer computes the same, also for what sees nothing."""
    keras.utils.set_random_seed(0)
    layer = ParallelMultiHeadAttention(
        heads[0], 8, num_key_value_heads=heads[1], causal=True, rotary_base=100.0, dropout=0.5
    )
    inputs = tf.random.normal([2, 21, 16])
    mask = np.random.default_rng(0).random((2, 21, 21)) < 0.6
    mask[:, 3] = False
    layer.build(inputs.shape)
    if recomputed:
        recompute(layer, "selective")

    def run(training):
        @tf.function
        def step():
            with tf.GradientTape() as tape:
                y = layer(inputs, attention_mask=mask if masked else None, training=training)
                loss = tf.reduce_sum(tf.sin(y))
            return y, *tape.gradient(loss, layer.trainable_variables)

        types = {o.type for o in step.get_concrete_function().graph.get_operations()}
        return step(), any("While" in name for name in types)

    expected, in_blocks = run(False)
    assert not in_blocks
    monkeypatch.setattr(attention, "_LONG", 21)
    monkeypatch.setattr(blockwise, "_CAUSAL_BLOCK", (8, 8))
    found, in_blocks = run(False)
    assert in_blocks
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert not run(True)[1], "Attention weights are dropped."
