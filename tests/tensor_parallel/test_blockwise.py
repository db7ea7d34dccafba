"""Stock attention layers that attend block by block compute what they computed before."""

from __future__ import annotations

import importlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import slow_but
from tfdist.context_parallel.blockwise import attention as blockwise
from tfdist.recompute import recompute
from tfdist.tensor_parallel import blockwise as switch

TIME, WIDTH = 21, 16


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    keras.utils.set_random_seed(0)
    monkeypatch.setattr(switch, "_FEW", 0)
    monkeypatch.setattr(blockwise, "_BLOCK", (8, 16))
    monkeypatch.setattr(blockwise, "_CAUSAL_BLOCK", (8, 8))


def hub(name: str, *args, **options):
    """A layer of KerasHub, by the module and the class under its models."""
    pytest.importorskip("keras_hub")
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(f"keras_hub.src.models.{module}"), kind)(
        *args, **options
    )


def decoder_mask():
    """What KerasHub gives its decoders: causal, and of one row the end is padding."""
    mask = np.tril(np.ones((2, TIME, TIME), bool))
    mask[1, :, 15:] = False
    return mask


def results_of(layer, *args, **options):
    """Outputs and gradients of a step, in float64; whether blocks were used."""
    inputs = tf.random.stateless_normal([2, TIME, WIDTH], (0, 1))
    layer(inputs, *(inputs for _ in args), **options)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            # Some of KerasHub's return their cache too.
            y = tf.nest.flatten(layer(x, *(x for _ in args), **options))[0]
            loss = tf.reduce_sum(tf.sin(tf.cast(y, tf.float32)))
        return y, *tape.gradient(loss, [x, *layer.trainable_variables])

    graph = step.get_concrete_function(inputs).graph
    results = [tf.cast(x, tf.float64).numpy() for x in step(inputs)]
    return results, any("While" in o.type for o in graph.get_operations())


def assert_unchanged(layer, *args, in_blocks=True, tolerance=1e-5, **options):
    """Outputs and gradients before and after; whether blocks were used the second time."""
    expected, before = results_of(layer, *args, **options)
    assert switch.use_blockwise(layer)
    found, after = results_of(layer, *args, **options)
    assert (before, after) == (False, in_blocks)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


_MASKS = {
    "none": {},
    "causal": {"use_causal_mask": True},
    "mask": {"attention_mask": decoder_mask()},
    "causal and mask": {"use_causal_mask": True, "attention_mask": np.ones((2, 1, TIME), bool)},
    "nothing seen": {"attention_mask": np.arange(TIME)[None, :, None] * np.ones((2, 1, TIME)) > 3},
}


@pytest.mark.parametrize("masks", _MASKS)
@pytest.mark.parametrize("kind", ["heads", "grouped"])
def test_attention_of_keras(kind, masks):
    layers = {
        "heads": lambda: keras.layers.MultiHeadAttention(4, 8),
        "grouped": lambda: keras.layers.GroupQueryAttention(8, 4, 2),
    }
    assert_unchanged(layers[kind](), None, **_MASKS[masks])


@pytest.mark.parametrize("training", [False, True])
def test_dropout_keeps_the_stock_way_in_training(training):
    layer = keras.layers.MultiHeadAttention(4, 8, dropout=1e-30)
    options = _MASKS["nothing seen"] if not training else {}
    assert_unchanged(layer, None, training=training, in_blocks=not training, **options)


def test_float64():
    layer = keras.layers.MultiHeadAttention(4, 8, dtype="float64")
    assert_unchanged(layer, None, use_causal_mask=True, tolerance=1e-6)


def test_bfloat16_is_as_near_to_float32_as_the_stock_way():
    # The two ways round to other numbers, which differ by processor: each has its own error.
    keras.utils.set_random_seed(0)
    exact = keras.layers.MultiHeadAttention(4, 8)
    truth, _ = results_of(exact, None, use_causal_mask=True)
    layer = keras.layers.MultiHeadAttention(4, 8, dtype="mixed_bfloat16")
    layer.build((2, TIME, WIDTH), (2, TIME, WIDTH))
    layer.set_weights(exact.get_weights())

    def errors():
        results, in_blocks = results_of(layer, None, use_causal_mask=True)
        differences = (x - y for x, y in zip(results, truth, strict=True))
        return np.array([np.sqrt(np.mean(np.square(x))) for x in differences]), in_blocks

    stock, before = errors()
    assert switch.use_blockwise(layer)
    blockwise_errors, after = errors()
    assert (before, after) == (False, True)
    np.testing.assert_array_less(blockwise_errors, 1.5 * stock)


def test_scores_come_the_stock_way():
    for layer in (keras.layers.MultiHeadAttention(4, 8), keras.layers.GroupQueryAttention(8, 4, 2)):
        assert switch.use_blockwise(layer)
        x = tf.random.normal([2, TIME, WIDTH])
        _, scores = layer(x, x, return_attention_scores=True)
        assert scores.shape == (2, 4, TIME, TIME)


def test_recomputed():
    layer = keras.layers.MultiHeadAttention(4, 8)
    x = tf.random.normal([2, TIME, WIDTH])
    layer(x, x)
    switch.use_blockwise(layer)
    recompute(layer, "selective")

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(layer(x, x, use_causal_mask=True)))
        return tape.gradient(loss, layer.trainable_variables)

    found = step(x)
    del layer._compute_attention
    for one, other in zip(found, tf.function(step.python_function)(x), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


_GROUPED = {"num_query_heads": 4, "num_key_value_heads": 2}
_GEMMA = {"head_dim": 8, **_GROUPED}
_HUB = {
    "gemma": lambda: hub("gemma.gemma_attention.CachedGemmaAttention", **_GEMMA),
    "gemma 2": lambda: hub(
        "gemma.gemma_attention.CachedGemmaAttention",
        **_GEMMA,
        logit_soft_cap=2.0,
        use_sliding_window_attention=True,
        sliding_window_size=5,
        query_head_dim_normalize=False,
    ),
    "gemma 3": lambda: hub(
        "gemma3.gemma3_attention.CachedGemma3Attention",
        **_GEMMA,
        use_sliding_window_attention=True,
        sliding_window_size=5,
    ),
    "gpt-neox": lambda: hub("gpt_neo_x.gpt_neo_x_attention.GPTNeoXAttention", 2, WIDTH),
    "llama": lambda: hub("llama.llama_attention.LlamaAttention", **_GROUPED),
    "mistral": lambda: hub("mistral.mistral_attention.CachedMistralAttention", **_GROUPED),
    "mixtral": lambda: hub("mixtral.mixtral_attention.CachedMixtralAttention", **_GROUPED),
    "phi-3": lambda: hub("phi3.phi3_attention.Phi3Attention", **_GROUPED),
    "qwen": lambda: hub(
        "qwen.qwen_attention.QwenAttention",
        **_GROUPED,
        use_sliding_window_attention=True,
        sliding_window_size=5,
    ),
    "qwen 3": lambda: hub(
        "qwen3.qwen3_attention.Qwen3Attention", **_GROUPED, head_dim=8, sliding_window_size=5
    ),
    "qwen moe": lambda: hub("qwen_moe.qwen_moe_attention.QwenMoeAttention", **_GROUPED),
    "qwen 3 moe": lambda: hub(
        "qwen3_moe.qwen3_moe_attention.Qwen3MoeAttention", **_GROUPED, head_dim=8
    ),
}


@pytest.mark.parametrize("name", slow_but(["gemma 2", "llama", "qwen"], list(_HUB)))
def test_attention_of_keras_hub(name):
    assert_unchanged(_HUB[name](), attention_mask=decoder_mask())


def test_cached_attention_of_keras_hub():
    keras_hub = pytest.importorskip("keras_hub")
    layer = keras_hub.layers.CachedMultiHeadAttention(4, 8)
    assert_unchanged(layer, None, attention_mask=decoder_mask())
    x = tf.random.normal([2, 1, WIDTH])
    cache = tf.random.normal([2, 2, TIME, 4, 8])
    options = {"cache": cache, "cache_update_index": 7}
    mask = tf.range(TIME)[None, None, :] <= 7
    found = layer(x, x, attention_mask=mask, **options)
    del layer._compute_attention
    for one, other in zip(found, layer(x, x, attention_mask=mask, **options), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


class _OfItsOwn(keras.layers.MultiHeadAttention):
    def _compute_attention(self, query, key, value, *args, **kwargs):
        return value, None


def test_what_is_not_known_is_left():
    layers = [keras.layers.Dense(3), _OfItsOwn(2, 4), keras.layers.Attention()]
    for layer in layers:
        before = dict(vars(layer))
        assert not switch.use_blockwise(layer)
        assert vars(layer) == before
    sinks = hub("gpt_oss.gpt_oss_attention.GptOssAttention", **_GROUPED)
    assert not switch.use_blockwise(sinks)
    with pytest.raises(TypeError, match="layer"):
        switch.use_blockwise("attention")
