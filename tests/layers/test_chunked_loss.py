"""A cross-entropy that takes logits in chunks is the one of whole logits, without them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks, slow_but
from tests.layers import chunked_loss_programs as programs
from tfdist import layers
from tfdist.layers import losses
from tfdist.testing import RankPool

_SIZE, _WIDTH = 23, 8


class _Taken:
    """How often the loss was made in chunks."""

    count = 0


@pytest.fixture
def taken(monkeypatch):
    found, original = _Taken(), losses.chunked_cross_entropy

    def counted(*args):
        found.count += 1
        return original(*args)

    monkeypatch.setattr(losses, "chunked_cross_entropy", counted)
    return found


_HEADS = {
    "tied": lambda: keras.layers.ReversibleEmbedding(_SIZE, _WIDTH),
    "own table": lambda: keras.layers.ReversibleEmbedding(_SIZE, _WIDTH, tie_weights=False),
    "capped": lambda: keras.layers.ReversibleEmbedding(_SIZE, _WIDTH, logit_soft_cap=0.5),
    "half": lambda: keras.layers.ReversibleEmbedding(_SIZE, _WIDTH, dtype="mixed_bfloat16"),
    "reverse as float32": lambda: keras.layers.ReversibleEmbedding(
        _SIZE, _WIDTH, dtype="mixed_bfloat16", reverse_dtype="float32", logit_soft_cap=0.5
    ),
    "tfdist's": lambda: layers.VocabParallelEmbedding(_SIZE, _WIDTH),
}


def step(embedding, loss, labels, *, jit_compile=False, dense=None, between=None):
    """Loss and gradients of weights and of hidden states, as a step of a graph."""

    @tf.function(jit_compile=jit_compile)
    def run(hidden, labels, weights):
        with tf.GradientTape() as tape:
            tape.watch(hidden)
            logits = embedding(hidden, reverse=True) if dense is None else dense(hidden)
            logits = logits if between is None else between(logits)
            value = loss(labels, logits, sample_weight=weights)
        variables = (embedding if dense is None else dense).trainable_variables
        # An embedding that is called in reverse alone has no gradient for its other table.
        found = tape.gradient(value, [hidden, *variables])
        return value, *(0.0 if each is None else each for each in found)

    hidden = tf.random.stateless_normal([*labels.shape, _WIDTH], (0, 1))
    weights = tf.random.stateless_uniform(labels.shape, (2, 3))
    return run(hidden, labels, weights)


def assert_same(found, expected, tolerance=1e-6):
    for one, other in zip(found, expected, strict=True):
        one, other = (
            np.asarray(tf.cast(tf.convert_to_tensor(x), tf.float64)) for x in (one, other)
        )
        # Biases of keys have no gradient but for rounding.
        scale = max(np.abs(other).max(), 1e-3)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * scale)


def stock():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def labels_of(*shape):
    return tf.constant(np.random.default_rng(0).integers(0, _SIZE, shape), tf.int32)


@pytest.mark.parametrize("chunk_size", [1, 4, 21, 1000])
@pytest.mark.parametrize("head", _HEADS)
def test_same_as_of_whole_logits(head, chunk_size, taken):
    embedding = _HEADS[head]()
    embedding(tf.zeros([1, 1], tf.int32))
    if head == "own table":
        embedding(tf.zeros([1, 1, _WIDTH]), reverse=True)
    labels = labels_of(3, 7)
    expected = step(embedding, stock(), labels)
    loss = layers.VocabParallelCrossEntropy(_SIZE, chunk_size=chunk_size)
    found = step(embedding, loss, labels)
    assert taken.count == 1
    # The gradient of a table in half precision is rounded once, and not summed in it.
    assert_same(found, expected, 1e-2 if head == "half" else 1e-6)


@pytest.mark.parametrize("reduction", ["sum", "none", "mean_with_sample_weight"])
def test_reductions(reduction, taken):
    embedding = _HEADS["tied"]()
    embedding(tf.zeros([1, 1], tf.int32))
    expected, found = (
        step(embedding, loss, labels_of(3, 7))
        for loss in (
            keras.losses.SparseCategoricalCrossentropy(True, reduction=reduction),
            layers.VocabParallelCrossEntropy(_SIZE, reduction, chunk_size=4),
        )
    )
    assert taken.count == 1
    assert_same(found, expected)


def test_heads_without_an_embedding(taken):
    labels = labels_of(3, 7)
    dense = keras.layers.Dense(_SIZE, use_bias=False)
    head = layers.VocabParallelHead(_SIZE)
    for layer in (dense, head):
        layer(tf.zeros([1, 1, _WIDTH]))
        loss = layers.VocabParallelCrossEntropy(_SIZE, chunk_size=4)
        assert_same(step(None, loss, labels, dense=layer), step(None, stock(), labels, dense=layer))
    assert taken.count == 2


def _reversed_gradient(x):
    @tf.custom_gradient
    def identity(x):
        return tf.identity(x), lambda dy: -dy

    return identity(x)


_BETWEEN = {
    "a gradient of its own": _reversed_gradient,
    "no gradient": lambda x: x + 0 * tf.stop_gradient(x),
    "scaled": lambda x: 0.5 * x,
    "other cap": lambda x: 2.0 * tf.tanh(x / 3.0),
    "twice capped": lambda x: 2.0 * tf.tanh(2.0 * tf.tanh(x / 2.0) / 2.0 / 2.0),
    "narrower": lambda x: tf.cast(tf.cast(x, tf.float16), tf.float32),
    "other classes": lambda x: tf.reverse(x, [-1]),
}


@pytest.mark.parametrize("between", _BETWEEN)
def test_what_it_cannot_see_through_it_leaves_whole(between, taken):
    embedding = _HEADS["tied"]()
    embedding(tf.zeros([1, 1], tf.int32))
    options = {"between": _BETWEEN[between]}
    loss = layers.VocabParallelCrossEntropy(_SIZE, chunk_size=4)
    found = step(embedding, loss, labels_of(3, 7), **options)
    assert taken.count == 0
    assert_same(found, step(embedding, stock(), labels_of(3, 7), **options))


def test_whole_logits_in_eager_steps(taken):
    logits = tf.random.normal([3, 7, _SIZE])
    loss = layers.VocabParallelCrossEntropy(_SIZE, chunk_size=4)
    np.testing.assert_allclose(
        loss(labels_of(3, 7), logits), stock()(labels_of(3, 7), logits), rtol=1e-6
    )
    assert taken.count == 0


def test_compiled_by_xla(taken):
    embedding = _HEADS["capped"]()
    embedding(tf.zeros([1, 1], tf.int32))
    loss = layers.VocabParallelCrossEntropy(_SIZE, chunk_size=4)
    found = step(embedding, loss, labels_of(3, 7), jit_compile=True)
    assert taken.count == 1
    assert_same(found, step(embedding, stock(), labels_of(3, 7)), 1e-5)


def test_saved_with_its_chunk_size():
    loss = layers.VocabParallelCrossEntropy(7, chunk_size=3)
    assert keras.losses.deserialize(keras.losses.serialize(loss)).chunk_size == 3
    with pytest.raises(ValueError, match="chunk_size"):
        layers.VocabParallelCrossEntropy(7, chunk_size=0)


@pytest.mark.slow
def test_plain_models_of_keras_hub(one_process):
    """Nothing but the loss is tfdist's."""
    pytest.importorskip("keras_hub")
    expected, _ = one_process.run(programs.train, None, None, 10, timeout=240, hub=True)[0]
    found, columns = one_process.run(programs.train, None, 5, 10, timeout=240, hub=True)[0]
    assert columns == {programs.VOCABULARY}
    assert_same(found, expected, 1e-5)


_MESHES = {
    "data": ({"data": 2}, {}),
    "zero-3": ({"data": 2, "zero_stage": 3}, {}),
    "zero-3 of a head of its own": ({"data": 2, "zero_stage": 3}, {"tied_head": False}),
    "tensor": ({"data": 1, "tensor": 2}, {}),
    "sequence": ({"data": 1, "tensor": 2}, {"sequence_parallel": True, "tied_head": False}),
    "hub": ({"data": 2, "zero_stage": 3}, {"hub": True}),
    "hub by tensor": ({"data": 1, "tensor": 2}, {"hub": True}),
}


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("mesh", slow_but(["tensor"], list(_MESHES)))
def test_on_ranks(pool, one_process, mesh):
    """Of 9 rows in batches of 4 the last leaves a rank without any."""
    axes, options = _MESHES[mesh]
    if options.get("hub"):
        pytest.importorskip("keras_hub")
    single = {key: value for key, value in options.items() if key != "sequence_parallel"}
    expected, _ = one_process.run(programs.train, None, None, 9, timeout=240, **single)[0]
    share = -(-programs.VOCABULARY // axes.get("tensor", 1))
    for found, columns in pool.run(programs.train, axes, 5, 9, timeout=300, **options):
        assert columns == {share}
        assert_same(found, expected, 2e-5)


@on_ranks(("horovod", 2))
@pytest.mark.slow
def test_half_precision_on_ranks(pool, one_process):
    policy = "mixed_bfloat16"
    expected, _ = one_process.run(programs.train, None, None, 9, policy, timeout=240)[0]
    for found, columns in pool.run(programs.train, {"data": 2}, 5, 9, policy, timeout=300):
        assert columns == {programs.VOCABULARY}
        assert_same(found, expected, 5e-2)


@pytest.mark.slow
def test_takes_less_memory():
    """All logits are 256 MiB, in whose place TensorFlow puts their gradients."""
    peaks = []
    for chunk_size in (64, None):
        with RankPool(1, "local", threads=1) as process:
            peaks.append(process.run(programs.peak_bytes, chunk_size, timeout=240)[0])
    assert peaks[0] < 32 * 2**20 < 256 * 2**20 < peaks[1], peaks
