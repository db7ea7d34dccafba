"""Rows of several documents in the models of KerasHub: no token sees another document, and positions begin again.

The `padding_mask` of such a row has for each token the place of the first token of its document, plus 1, and 0 for
padding. That of a row with one document is the usual one.

Decoders pass the mask to `merge_padding_and_attention_mask`, and apply a `RotaryEmbedding` without positions. Both are
wrapped, and differ only inside the call of a decoder of a model that `separate_documents` has prepared. Learned
positions are added before the decoders, from tokens alone: a model with these is connected again, with the same layers.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
from keras import ops

from tfdist.backend.keras.patching import Patch, apply_patches
from tfdist.backend.keras.private import all_layers
from tfdist.tensor_parallel.adapters import override
from tfdist.utils import checks
from tfdist.utils.temporary import attributes_set

#: The families whose decoders were tested.
FAMILIES = (
    "BloomBackbone",
    "FalconBackbone",
    "GPT2Backbone",
    "GPTNeoXBackbone",
    "Gemma3Backbone",
    "GemmaBackbone",
    "Llama3Backbone",
    "LlamaBackbone",
    "MistralBackbone",
    "MixtralBackbone",
    "OPTBackbone",
    "Phi3Backbone",
    "Qwen3Backbone",
    "Qwen3MoeBackbone",
    "QwenBackbone",
    "QwenMoeBackbone",
    "SmolLM3Backbone",
)
_MERGE = "merge_padding_and_attention_mask"
_MASKS = ("decoder_padding_mask", "padding_mask")
_LEARNED = (keras_hub.layers.PositionEmbedding, keras_hub.layers.TokenAndPositionEmbedding)


class _Local(threading.local):
    """What is known inside the call of a decoder.

    Attributes:
        documents: The mask of documents.
        mask: The usual mask, which the decoder has.
        places: The place of each token in its document.
    """

    documents: Any = None
    mask: Any = None
    places: Any = None


_local = _Local()


def separate_documents(task: Any) -> keras.Model:
    """The model with which to train a causal language model on rows of several documents.

    To be called before `recompute`, and before a `PipelineModel` is made of the result.

    Args:
        task: The task; its decoders are changed.

    Returns:
        The task; or a model of the same layers, if positions are learned.

    Raises:
        ValueError: The family is not supported.
    """
    checks.instance("task", task, keras_hub.models.CausalLM, "a causal language model")
    backbone = task.backbone
    kind = type(backbone).__name__
    if kind not in FAMILIES:
        raise ValueError(
            f"Rows of several documents require one of {', '.join(FAMILIES)}. Received: a {kind}. Use rows of "
            "one document."
        )
    apply_patches([Patch(keras_hub.layers.RotaryEmbedding, "call", ("self", "inputs"), _rotate)])
    for layer in all_layers(backbone):
        module = sys.modules[type(layer).__module__]
        names = inspect.signature(type(layer).call).parameters
        mask = next((name for name in _MASKS if name in names), None)
        if mask is None or not hasattr(module, _MERGE) or "call" in vars(layer):
            continue
        parameters = ("inputs", "padding_mask", "attention_mask")
        apply_patches([Patch(module, _MERGE, parameters, _merge)])
        override(layer, "call", _with_documents(layer.call, mask))
    if any(isinstance(layer, _LEARNED) for layer in all_layers(backbone)):
        return _with_positions(task)
    return task


def _with_documents(call: Callable, mask: str) -> Callable:
    """The call of a decoder, inside which the masks are those of documents."""
    signature = inspect.signature(call)

    @functools.wraps(call)
    def within(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        documents = given.arguments.get(mask)
        if documents is None:
            return call(*args, **kwargs)
        given.arguments[mask] = usual = ops.cast(documents > 0, documents.dtype)
        places = _places(documents)
        with attributes_set(_local, documents=documents, mask=usual, places=places):
            return call(*given.args, **given.kwargs)

    return within


def _merge(inputs, padding_mask, attention_mask, *, original: Callable):
    """The tokens that each token sees: [batch, time, time] instead of [batch, 1, time]."""
    documents = _local.documents
    if documents is None or padding_mask is not _local.mask:
        return original(inputs, padding_mask, attention_mask)
    same = ops.equal(documents[:, :, None], documents[:, None, :])
    same = ops.cast(same, "int32")
    if attention_mask is None:
        return same
    return ops.minimum(same, ops.cast(attention_mask, "int32"))


def _rotate(self, inputs, start_index=0, positions=None, *, original: Callable):
    """Rotates by the places in documents."""
    positions = _local.places if positions is None else positions
    return original(self, inputs, start_index, positions)


def _places(documents):
    """The place of each token in its document."""
    places = ops.arange(ops.shape(documents)[1], dtype="int32")
    return places - ops.maximum(ops.cast(documents, "int32") - 1, 0)


class DocumentPositions(keras.layers.Layer):
    """The place of each token in its document, from the mask of documents: int32 [batch, time]."""

    def call(self, documents):
        """Maps [batch, time] to the same shape."""
        return _places(documents)

    def compute_output_spec(self, documents):
        """Ints of the shape of the input."""
        return keras.KerasTensor(documents.shape, "int32")


def _with_positions(task: Any) -> keras.Model:
    """A model of the same layers, whose learned positions are those in documents."""
    backbone = task.backbone
    inputs = {
        name: keras.Input(each.shape[1:], dtype=each.dtype, name=name)
        for name, each in backbone.input.items()
    }
    places = DocumentPositions(name="document_positions")(inputs["padding_mask"])

    def connect(model, inputs, call) -> Any:
        return keras.models.clone_model(
            model, input_tensors=inputs, clone_function=lambda layer: layer, call_function=call
        )

    def call(layer, *args, **kwargs):
        positions = {"positions": places} if isinstance(layer, _LEARNED) else {}
        return layer(*args, **kwargs, **positions)

    hidden = connect(backbone, inputs, call)
    return connect(
        task,
        inputs,
        lambda layer, *args, **kwargs: (hidden if layer is backbone else layer)(*args, **kwargs),
    )
