"""Stock attention layers that compute attention block by block, without all scores at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import keras
import tensorflow as tf

from tfdist.backend.keras.attributes import attention_core
from tfdist.context_parallel.blockwise import blockwise_attention, fits_whole
from tfdist.tensor_parallel.adapters import override
from tfdist.tensor_parallel.attention_cores import AttentionCore, core_of
from tfdist.tensor_parallel.attributes import returns_scores
from tfdist.utils import checks

#: With fewer scores per head, the stock computation is as fast.
_FEW = 256 * 256


def use_blockwise(layer: keras.layers.Layer) -> bool:
    """Makes a stock attention layer compute attention block by block, in place.

    Its scale, soft cap of scores, grouping of heads, masks and sliding windows are kept. It computes as
    before what blocks do not support: dropout of attention weights in training, scores as an output, and
    inputs of other than four dims. The same holds for short sequences.

    Args:
        layer: Any layer.

    Returns:
        Whether the layer is supported: `keras.layers.MultiHeadAttention`, `GroupQueryAttention`, layers
        derived from them, or the attention of KerasHub's Gemma, Gemma 3, GPT-NeoX, Llama, Mistral,
        Mixtral, Phi-3, Qwen and classes derived from these. Others are not changed.
    """
    checks.instance("layer", layer, keras.layers.Layer, "a Keras layer")
    core = core_of(layer)
    if core is None:
        return False
    override(layer, attention_core.name, _in_blocks(layer, core))
    return True


def _in_blocks(layer, core: AttentionCore) -> Callable:
    stock = attention_core(layer)
    signature = inspect.signature(stock)

    def compute(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        asked = given.arguments
        query, key, value = (asked[name] for name in core.parameters[:3])
        training = asked.get("training")
        # In Keras None may mean either.
        drops = core.dropout(layer) > 0 and training is not False
        if drops or _wants_scores(layer, asked) or not _is_long(query, key):
            return stock(*args, **kwargs)
        mask = asked["attention_mask"]
        if core.window is not None:
            mask = core.window(layer, mask, asked.get("cache_update_index"))
        if mask is not None:
            mask = tf.cast(mask, tf.bool)
            mask = mask[:, None] if mask.shape.rank == 3 else mask
        causal = bool(asked.get("use_causal_mask"))
        found = _attend(layer, core, query, key, value, mask, causal)
        return (found, None) if core.gives_scores else found

    return compute


def _attend(layer, core: AttentionCore, query, key, value, mask, causal: bool):
    """Computes attention of tensors of shape [batch, time, heads, size]."""
    query, key, value = (tf.transpose(x, [0, 2, 1, 3]) for x in (query, key, value))
    out, lse = blockwise_attention(
        query,
        tf.cast(key, query.dtype),
        tf.cast(value, query.dtype),
        causal=causal,
        query_offset=0 if causal else None,
        mask=mask,
        scale=float(core.scale(layer)),
        soft_cap=core.soft_cap(layer),
        return_lse=True,
    )
    if core.sees_all and mask is not None and not core.dropout(layer):
        # The stock layer gives all scores of such a row the same value.
        of_all = tf.reduce_mean(value, axis=2, keepdims=True)
        out = tf.where(tf.math.is_inf(lse)[..., None], tf.cast(of_all, out.dtype), out)
    return tf.transpose(out, [0, 2, 1, 3])


def _wants_scores(layer, asked) -> bool:
    return bool(asked.get("return_attention_scores") or returns_scores(layer, False))


def _is_long(query, key) -> bool:
    """Whether there are many scores, or an unknown number of them."""
    if query.shape.rank != 4 or None in (query.shape[2], query.shape[3], key.shape[2]):
        return False
    queries, keys = query.shape[1], key.shape[1]
    if None in (queries, keys):
        return True
    return queries * keys > _FEW and not fits_whole(query.shape[0], query.shape[2], queries, keys)
