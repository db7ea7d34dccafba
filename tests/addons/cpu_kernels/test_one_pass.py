"""Layers that the compiled library computes in one pass give what TensorFlow's operations do."""

from __future__ import annotations

import collections
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks
from tfdist import layers, models
from tfdist.backend.kernels import has_kernels, kernels
from tfdist.context_parallel.blockwise import blocks
from tfdist.layers import activations, losses, normalization

pytestmark = pytest.mark.skipif(
    not has_kernels(),
    reason="The library is not built: `tfdist-install-horovod` builds it.",
)

#: Of no rows, of fewer than a register holds, of several blocks of rows.
SHAPES = [(0, 8), (3, 5), (2, 100, 67)]


def with_gradients(function, *inputs):
    """What it gives, and the gradients of a weighted sum of it."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = function(*inputs)
        weights = tf.reshape(tf.cos(tf.range(tf.size(y), dtype=tf.float32)), y.shape)
        loss = tf.reduce_sum(y * tf.cast(weights, y.dtype))
    return [y, *tape.gradient(loss, inputs)]


def assert_close(found, exact):
    for one, other in zip(found, exact, strict=True):
        scale = max(1.0, np.abs(other).max()) if tf.size(other) else 1.0
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize("shape", SHAPES)
def test_gelu(shape):
    x = 4 * np.random.default_rng(0).normal(size=shape)
    found = with_gradients(activations._one_pass, tf.constant(x, tf.float32))
    exact = with_gradients(
        lambda x: tf.nn.gelu(x, approximate=True), tf.constant(np.float32(x), tf.float64)
    )
    assert_close(found, exact)


def test_gelu_at_its_ends():
    x = tf.constant([0.0, -0.0, 1e-30, 1e4, -1e4, 90.0, -90.0])
    y, dx = with_gradients(activations._one_pass, x)
    np.testing.assert_allclose(y, [0, 0, 5e-31, 1e4, 0, 90, 0], rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(dx, tf.cos(tf.range(7.0)) * [0.5, 0.5, 0.5, 1, 0, 1, 0], atol=1e-6)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_no_number_is_seen(value):
    x = tf.constant([1.0, value, 2.0])
    assert not np.isfinite(activations._one_pass(x)[1])
    y = normalization._one_pass(x, tf.ones(3), tf.zeros(3), 1e-3)
    assert not np.isfinite(y).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_normalization(shape):
    random = np.random.default_rng(0)
    x = 3 * random.normal(size=shape) + 5
    inputs = [np.float32(x), *np.float32(random.normal(size=(2, shape[-1])))]
    found = with_gradients(
        lambda *inputs: normalization._one_pass(*inputs, 1e-3), *map(tf.constant, inputs)
    )
    exact = with_gradients(
        lambda x, scale, offset: normalized(x, centers=True) * scale + offset,
        *[tf.constant(each, tf.float64) for each in inputs],
    )
    assert_close(found, exact)


def normalized(x, *, centers: bool):
    """By the formula, step by step."""
    if centers:
        x -= tf.reduce_mean(x, axis=-1, keepdims=True)
    return x / tf.sqrt(tf.reduce_mean(x * x, axis=-1, keepdims=True) + 1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("centers", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_normalization_by_tensorflow(shape, centers, dtype):
    """What is narrow is kept narrow, and computed in float32."""
    random = np.random.default_rng(0)
    x = tf.cast(3 * random.normal(size=shape) + 1, dtype)
    scale, offset = (tf.constant(each, tf.float32) for each in random.normal(size=(2, shape[-1])))
    layer = types.SimpleNamespace(epsilon=1e-3, compute_dtype="float32")

    def layers_own(x, *weights):
        variables = [types.SimpleNamespace(value=weight) for weight in weights]
        return normalization._normalized(layer, x, *variables, centers=centers)

    found = with_gradients(layers_own, x, scale, offset)
    exact = with_gradients(
        lambda x, scale, offset: normalized(x, centers=centers) * scale + offset,
        *[tf.cast(each, tf.float64) for each in (x, scale, offset)],
    )
    if dtype == "float32":
        assert_close(found, exact)
    else:
        value, *gradients = found
        assert_close([value], exact[:1])
        # That of the input is rounded to the input's dtype.
        for one, other in zip(gradients, exact[1:], strict=True):
            most = float(tf.reduce_max(tf.abs(other)))
            np.testing.assert_allclose(tf.cast(one, tf.float64), other, atol=2**-7 * most)


@pytest.mark.parametrize("shape", SHAPES)
def test_cross_entropy(shape):
    random = np.random.default_rng(0)
    logits = 30 * random.normal(size=shape)
    labels = random.integers(0, shape[-1], shape[:-1]).astype("int32")
    found = with_gradients(lambda x: losses._one_pass(x, labels), tf.constant(logits, tf.float32))
    exact = with_gradients(
        lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x),
        tf.constant(np.float32(logits), tf.float64),
    )
    assert_close(found, exact)


def test_cross_entropy_at_its_ends():
    logits = tf.constant([[0, -np.inf, 0], [1e4, -1e4, 0], [np.nan, 0, 0], [np.inf, 0, 0]])
    loss, gradient = with_gradients(
        lambda x: losses._one_pass(x, tf.constant([0, 1, 1, 0])), logits
    )
    np.testing.assert_allclose(loss[:2], [np.log(2), 2e4], rtol=1e-6)
    assert np.isnan(loss[2:]).all()
    slopes = tf.cos(tf.range(2.0))[:, None] * [[-0.5, 0, 0.5], [1, -1, 0]]
    np.testing.assert_allclose(gradient[:2], slopes, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_exponentials(shape):
    logits = np.float32(30 * np.random.default_rng(0).normal(size=shape))
    highest = logits.max(axis=-1) + np.float32(2)
    found = kernels().tfdist_exponentials(logits=logits, highest=highest)
    exact = np.exp(np.float64(logits) - np.float64(highest)[..., None])
    assert_close(found, [exact, exact.sum(axis=-1)])


def test_exponentials_at_their_ends():
    logits = tf.constant([[0, -np.inf], [-np.inf, -np.inf], [-1e38, 1e4], [np.nan, 0]])
    found, sums = kernels().tfdist_exponentials(
        logits=logits, highest=tf.constant([0.0, 3.0, 1e4, 0.0])
    )
    np.testing.assert_array_equal(found[:3], [[1, 0], [0, 0], [0, 1]])
    np.testing.assert_array_equal(sums[:3], [1, 0, 1])
    assert np.isnan(sums[3])


@pytest.mark.parametrize("shape", SHAPES)
def test_softmax(shape):
    random = np.random.default_rng(0)
    scores = np.float32(5 * random.normal(size=shape))
    weights, lse = kernels().tfdist_softmax(scores=scores)
    assert_close([weights], [tf.nn.softmax(tf.constant(scores, tf.float64))])
    exact = tf.reduce_logsumexp(tf.constant(scores, tf.float64), axis=-1, keepdims=True)
    np.testing.assert_allclose(lse, exact, rtol=1e-6)
    dy = np.float32(random.normal(size=shape))
    again, dx = kernels().tfdist_softmax_gradient(exponents=scores - lse, dy=dy)
    assert_close([again], [weights])
    np.testing.assert_array_equal(dx, again * dy)


def test_softmax_at_its_ends():
    scores = tf.constant([[0, -1e38, 0], [1e4, -1e4, 0], [-1e38, -1e38, -1e38], [np.nan, 0, 0]])
    weights, lse = kernels().tfdist_softmax(scores=scores)
    third = 1 / 3
    np.testing.assert_allclose(weights[:3], [[0.5, 0, 0.5], [1, 0, 0], [third] * 3], rtol=1e-6)
    assert not weights[:2].numpy()[[0, 1, 1], [1, 1, 2]].any()  # Exactly 0: it sees nothing.
    np.testing.assert_allclose(lse[:3, 0], [np.log(2), 1e4, -1e38], rtol=1e-6)
    assert np.isnan(weights[3]).all() and np.isnan(lse[3]).all()
    weights, dx = kernels().tfdist_softmax_gradient(
        exponents=tf.constant([0.0, -1e38, np.nan]), dy=tf.constant([2.0, 3.0, 4.0])
    )
    np.testing.assert_array_equal([weights, dx], [[1, 0, np.nan], [2, 0, np.nan]])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"soft_cap": 3.0}, {"mask": True}])
def test_attention_by_blocks(options, monkeypatch):
    """Rows and columns that do not fill a block, grouped heads, and rows that see nothing."""
    random = np.random.default_rng(0)
    inputs = [tf.constant(random.normal(size=(2, h, 21, 8)), tf.float32) for h in (4, 2, 2)]
    if "mask" in options:
        options = {"mask": random.random((2, 1, 21, 21)) < 0.2}

    def attend(*inputs):
        return layers.blockwise_attention(*inputs, block_size=(8, 16), **options)

    plain = with_gradients(tf.function(attend), *inputs)
    monkeypatch.setattr(blocks, "kernels_enabled", lambda: True)
    found = with_gradients(tf.function(attend), *inputs)
    assert_close(found, plain)
    wide = with_gradients(tf.function(attend), *[tf.cast(each, tf.float64) for each in inputs])
    assert_close(found, wide)


@pytest.mark.parametrize("label", [-1, 3])
def test_labels_out_of_range_are_refused(label):
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"\[0, 3\). Received: {label}"):
        kernels().tfdist_cross_entropy(logits=tf.zeros((2, 3)), labels=[0, label])


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("tfdist_gelu_gradient", {"dy": [2], "x": [3]}, r"\[2\] and \[3\]"),
        ("tfdist_cross_entropy", {"logits": [2, 3], "labels": [3]}, r"\[2\] and \[3\]"),
        ("tfdist_cross_entropy", {"logits": [], "labels": []}, "dim of classes"),
        ("tfdist_exponentials", {"logits": [2, 3], "highest": [3]}, r"\[2\] and \[3\]"),
        ("tfdist_exponentials", {"logits": [], "highest": []}, "dim of classes"),
        ("tfdist_softmax", {"scores": []}, "dim of columns"),
        ("tfdist_softmax_gradient", {"exponents": [2], "dy": [3]}, r"\[2\] and \[3\]"),
        ("tfdist_layer_norm", {"x": [2, 3], "scale": [3], "offset": [2]}, r"\[3\], \[2\]"),
        ("tfdist_layer_norm", {"x": [], "scale": [0], "offset": [0]}, "last dim"),
        (
            "tfdist_layer_norm_gradient",
            {"dy": [2, 3], "x": [3, 2], "scale": [2], "mean": [3], "inverse": [3]},
            r"\[2,3\] and \[3,2\]",
        ),
        (
            "tfdist_layer_norm_gradient",
            {"dy": [3, 2], "x": [3, 2], "scale": [2], "mean": [2], "inverse": [3]},
            "Each row",
        ),
        (
            "tfdist_layer_norm_gradient",
            {"dy": [3, 2], "x": [3, 2], "scale": [3], "mean": [3], "inverse": [3]},
            r"\[3\] and \[3,2\]",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(name, inputs, message):
    tensors = {
        key: tf.zeros(shape, tf.int32 if key == "labels" else tf.float32)
        for key, shape in inputs.items()
    }
    epsilon = {"epsilon": 1e-3} if name == "tfdist_layer_norm" else {}
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        getattr(kernels(), name)(**tensors, **epsilon)


def operations_of(function) -> collections.Counter:
    """How many of each kind a traced function has, with those that it calls."""
    graph = function.graph.as_graph_def()
    nodes = [node for function in graph.library.function for node in function.node_def]
    return collections.Counter(node.op for node in [*graph.node, *nodes])


def operations_of_a_step(policy: str, jit_compile: bool = False) -> collections.Counter:
    from tfdist.testing import strategy

    with strategy().scope():
        keras.config.set_dtype_policy(policy)
        try:
            model = models.gpt(16, num_layers=2, width=8, num_heads=2, max_length=4)
        finally:
            keras.config.set_dtype_policy("float32")
        model.compile("sgd", layers.VocabParallelCrossEntropy(16), jit_compile=jit_compile)

    @tf.function
    def step(tokens):
        return model.distribute_strategy.run(model.train_step, args=((tokens, tokens),))

    return operations_of(step.get_concrete_function(tf.zeros((2, 4), tf.int32)))


@on_ranks(("horovod", 2), ("tensorflow", 2))
@pytest.mark.parametrize(("policy", "activations"), [("float32", 2), ("mixed_bfloat16", 0)])
def test_steps_of_several_ranks_take_them(pool, policy, activations):
    for found in pool.run(operations_of_a_step, policy, timeout=120):
        assert found["TfdistGelu"] == found["TfdistGeluGradient"] == activations
        assert found["TfdistLayerNorm"] == found["TfdistLayerNormGradient"] == 5
        assert found["TfdistCrossEntropy"] == 1


def operations_of_a_split_model(policy: str) -> collections.Counter:
    import keras_hub

    from tfdist import Mesh, parallelize
    from tfdist.testing import strategy

    with strategy(Mesh(tensor=2)).scope():
        backbone = keras_hub.models.GPT2Backbone(
            13, 2, 2, 8, 16, dropout=0.0, max_sequence_length=4, dtype=policy
        )
        model = parallelize(keras_hub.models.GPT2CausalLM(backbone, compile=False))
        model.compile("sgd", layers.VocabParallelCrossEntropy(13), weighted_metrics=None)

    @tf.function
    def step(tokens):
        inputs = {"token_ids": tokens, "padding_mask": tf.ones_like(tokens)}
        return model.distribute_strategy.run(model.train_step, args=((inputs, tokens),))

    return operations_of(step.get_concrete_function(tf.zeros((2, 4), tf.int32)))


@on_ranks(("horovod", 2))
@pytest.mark.parametrize(("policy", "activations"), [("float32", 2), ("mixed_bfloat16", 0)])
def test_layers_of_kerashub_that_are_split_take_them(pool, policy, activations):
    for found in pool.run(operations_of_a_split_model, policy, timeout=120):
        assert found["TfdistGelu"] == found["TfdistGeluGradient"] == activations
        assert found["TfdistLayerNorm"] == found["TfdistLayerNormGradient"] == 5
        assert found["TfdistExponentials"] == 1 and not found["OneHot"]


def operations_of_attention() -> collections.Counter:
    from tfdist.testing import strategy

    def train(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layers.blockwise_attention(x, x, x)
        return tape.gradient(y, x)

    shared = strategy()
    step = tf.function(lambda x: shared.run(train, (x,)), autograph=False)
    return operations_of(step.get_concrete_function(tf.zeros((1, 2, 8, 4))))


@on_ranks(("horovod", 2))
def test_attention_of_several_ranks_takes_them(pool):
    for found in pool.run(operations_of_attention, timeout=120):
        assert found["TfdistSoftmax"] == found["TfdistSoftmaxGradient"] == 1
        assert not found["Softmax"] and not found["Exp"]


@pytest.mark.parametrize(("jit_compile", "activations"), [(False, 2), (True, 0)])
def test_one_rank_takes_them_but_for_xla(one_process, jit_compile, activations):
    found = one_process.run(operations_of_a_step, "float32", jit_compile, timeout=60)[0]
    assert found["TfdistGelu"] == found["TfdistGeluGradient"] == activations


def test_what_no_strategy_trains_does_without():
    model = models.gpt(16, num_layers=2, width=8, num_heads=2, max_length=4)
    graph = tf.function(model).get_concrete_function(tf.zeros((2, 4), tf.int32)).graph
    assert not any("Tfdist" in operation.type for operation in graph.get_operations())
