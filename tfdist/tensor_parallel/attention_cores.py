"""The method of an attention layer of Keras or KerasHub that computes the output from Q, K and V.

It is called `_compute_attention`, with different arguments in each class. All compute
softmax(scale Q K^T) V with a mask, configured by different attributes; the supported classes are listed
here. A subclass of one of them is supported if it inherits the method.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import keras

from tfdist.backend.keras.attributes import attention_core

_MODELS = "keras_hub.src.models."


@dataclasses.dataclass(frozen=True)
class AttentionCore:
    """The attention of one class.

    Attributes:
        parameters: The parameters of the method.
        scale: Returns a layer's factor of the scores.
        soft_cap: Returns a layer's cap of the scores, or None.
        dropout: Returns a layer's rate of dropout of attention weights in training.
        window: None, or a function from a layer, its mask and the index of the first query to the mask
            with the sliding window.
        gives_scores: Whether the method returns a pair, whose second element is the scores or None.
        sees_all: Whether a query whose keys are all masked attends equally to all keys, and not to
            zeros, in a layer without dropout.
    """

    parameters: tuple[str, ...]
    scale: Callable[[Any], float]
    soft_cap: Callable[[Any], float | None] = lambda layer: None
    dropout: Callable[[Any], float] = lambda layer: 0.0
    window: Callable | None = None
    gives_scores: bool = False
    sees_all: bool = False


def core_of(layer: keras.layers.Layer) -> AttentionCore | None:
    """The attention of a layer between its projections; None if its class is not supported."""
    name = attention_core.name
    owner = next((owner for owner in type(layer).__mro__ if name in vars(owner)), None)
    if owner is None:
        return None
    core = _CORES.get(f"{owner.__module__}.{owner.__qualname__}")
    call = inspect.unwrap(type(layer).call)
    if core is None or name not in getattr(call, "__code__", call).co_names:
        return None
    found = tuple(inspect.signature(getattr(owner, name)).parameters)
    return core if found[: len(core.parameters) + 1] == ("self", *core.parameters) else None


def _of_hidden_size(layer) -> float:
    if layer.query_head_dim_normalize:
        return 1 / math.sqrt(layer.head_dim)
    return 1 / math.sqrt(layer.hidden_dim // layer.num_query_heads)


def _gemma_window(layer, mask, index):
    if not layer.use_sliding_window_attention or mask is None:
        return mask
    return layer._mask_sliding_window(mask, cache_update_index=index)


def _qwen_window(layer, mask, index):
    in_use = getattr(layer, "use_sliding_window_attention", layer.sliding_window_size)
    return layer._mask_sliding_window(mask, cache_update_index=index or 0) if in_use else mask


_PLAIN = AttentionCore(
    ("query", "key", "value", "attention_mask"), lambda layer: layer._inv_norm_factor
)
_QWEN = dataclasses.replace(
    _PLAIN, parameters=(*_PLAIN.parameters, "cache_update_index"), window=_qwen_window
)
_TRAINED = (*_PLAIN.parameters, "training")
_GEMMA = AttentionCore(
    ("q", "k", "v", "attention_mask", "training", "cache_update_index"),
    _of_hidden_size,
    soft_cap=lambda layer: layer.logit_soft_cap,
    dropout=lambda layer: layer.dropout,
    window=_gemma_window,
)
_CORES = {
    "keras.src.layers.attention.multi_head_attention.MultiHeadAttention": AttentionCore(
        (*_TRAINED, "return_attention_scores", "use_causal_mask"),
        lambda layer: layer._inverse_sqrt_key_dim,
        dropout=lambda layer: layer._dropout,
        gives_scores=True,
        sees_all=True,
    ),
    "keras.src.layers.attention.grouped_query_attention.GroupedQueryAttention": AttentionCore(
        (*_TRAINED, "use_causal_mask"),
        lambda layer: layer._inverse_sqrt_head_dim,
        dropout=lambda layer: layer.dropout,
        gives_scores=True,
        sees_all=True,
    ),
    f"{_MODELS}gemma.gemma_attention.CachedGemmaAttention": _GEMMA,
    f"{_MODELS}gemma3.gemma3_attention.CachedGemma3Attention": _GEMMA,
    f"{_MODELS}gpt_neo_x.gpt_neo_x_attention.GPTNeoXAttention": dataclasses.replace(
        _PLAIN, parameters=_TRAINED, dropout=lambda layer: layer.dropout
    ),
    f"{_MODELS}llama.llama_attention.LlamaAttention": _PLAIN,
    f"{_MODELS}mistral.mistral_attention.CachedMistralAttention": _PLAIN,
    f"{_MODELS}mixtral.mixtral_attention.CachedMixtralAttention": _PLAIN,
    f"{_MODELS}phi3.phi3_attention.Phi3Attention": _PLAIN,
    f"{_MODELS}qwen.qwen_attention.QwenAttention": _QWEN,
    f"{_MODELS}qwen3.qwen3_attention.Qwen3Attention": _QWEN,
    f"{_MODELS}qwen3_5.qwen3_5_attention.Qwen3_5Attention": _QWEN,
    f"{_MODELS}qwen3_moe.qwen3_moe_attention.Qwen3MoeAttention": _QWEN,
    f"{_MODELS}qwen_moe.qwen_moe_attention.QwenMoeAttention": _QWEN,
}
