"""KerasHub's exporters of its families, and what they leave out or would write wrong.

`keras_hub.src.utils.transformers.export` is private to KerasHub, whose public methods have no other place for the
tensors of a model; `tests/addons/hub/test_exports.py` fails if it changes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.addons.hub.merging import PlainModel
from tfdist.addons.hub.streaming import Exporter
from tfdist.utils.temporary import attributes_set

#: The module of the functions that KerasHub's public methods call. A program may call the first one
#: itself.
MODULE = "keras_hub.src.utils.transformers.export.hf_exporter"
INSTEAD = "Save it with `save_to_preset`, which keeps all of it."
_CONFIG = "config.json"

#: Options that KerasHub's exporters ignore but must write: by the backbone, the values of its
#: configuration with which the file is correct nevertheless.
_NOT_WRITTEN: dict[str, dict[str, tuple]] = {
    "GemmaBackbone": {
        "num_key_value_heads": (1,),  # Only the first one is written.
        "layer_norm_epsilon": (1e-6,),
        # These are Gemma 2.
        "use_post_ffw_norm": (False,),
        "use_post_attention_norm": (False,),
        "attention_logit_soft_cap": (None,),
        "final_logit_soft_cap": (None,),
        "use_sliding_window_attention": (False,),
    },
    "Gemma3Backbone": {
        "layer_norm_epsilon": (1e-6,),  # Its blocks use this value, whatever the configuration.
        "use_query_key_norm": (True,),
        "use_post_ffw_norm": (True,),
        "use_post_attention_norm": (True,),
        "attention_logit_soft_cap": (None,),
        "final_logit_soft_cap": (None,),
        "is_embedding_model": (False,),
    },
    "Llama3Backbone": {"rope_position_scaling_factor": (1.0, 1)},
    "MistralBackbone": {"rope_scaling_factor": (1.0, 1)},
    "QwenBackbone": {
        "rope_scaling_factor": (1.0, 1),
        "use_sliding_window_attention": (False,),
    },
}
#: Those whose heads together must be as wide as the layer.
_NARROW_HEADS = ("GemmaBackbone", "MistralBackbone")
#: Keys that KerasHub's exporters do not write to `config.json`: transformers does not need them, but
#: vLLM and KerasHub's own `from_preset` do.
_COMPLETED: dict[str, dict[str, Any]] = {
    "GPT2Backbone": {"architectures": ["GPT2LMHeadModel"]},
    "GemmaBackbone": {"architectures": ["GemmaForCausalLM"]},
    "QwenBackbone": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": False,
        "sliding_window": None,
    },
}


def check_exporter(model) -> None:
    """Checks that KerasHub can export a model, and would write it right.

    Raises:
        ImportError: The package `safetensors` is not installed.
        ValueError: It cannot.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError(
            "`export_to_transformers` requires the package safetensors, which KerasHub does not install. "
            "Run: pip install safetensors."
        )
    backbone = getattr(model, "backbone", model)
    kind = type(backbone).__name__
    known = _exporters()
    if kind not in known:
        raise ValueError(
            f"KerasHub can only export models with {', '.join(sorted(known))}. Received: `{model.name}` with "
            f"{kind}. {INSTEAD}"
        )
    for requires, received in _not_written(kind, backbone):
        raise ValueError(
            f"KerasHub's export of {kind} requires {requires}; otherwise the file would be that of another "
            f"model. Received: {received}. {INSTEAD}"
        )


def _not_written(kind: str, backbone) -> Iterator[tuple[str, str]]:
    """The options that the exporter of a backbone ignores: the required values and the actual ones."""
    for name, right in _NOT_WRITTEN.get(kind, {}).items():
        value = getattr(backbone, name, right[0])
        if value not in right:
            yield f"{name}={right[0]}", f"{name}={value}"
    # Gemma's heads are written in a wrong order if they are wider than the layer, and the
    # configuration of Mistral assumes another width.
    width = getattr(backbone, "head_dim", None) if kind in _NARROW_HEADS else None
    if width and backbone.num_query_heads * width != backbone.hidden_dim:
        found = f"{backbone.num_query_heads} * {width} and hidden_dim={backbone.hidden_dim}"
        yield "num_query_heads * head_dim = hidden_dim", found
    # Transformers assumes this, whatever the configuration.
    if kind == "Gemma4Backbone" and backbone.layer_types[-1] != "full_attention":
        yield "a last layer of full_attention", backbone.layer_types[-1]


def exporter_of(plain: PlainModel, *, has_head: bool) -> Exporter:
    """KerasHub's exporter of a plain model, with or without the projection to the vocabulary."""
    kind = type(getattr(plain.model, "backbone", plain.model)).__name__
    return Exporter.of(plain, _exporters()[kind], has_head=has_head)


def _exporters() -> dict[str, Callable]:
    """KerasHub's functions from a backbone to its tensors, by the name of its class."""
    return importlib.import_module(MODULE).MODEL_EXPORTERS


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """KerasHub's exports inside write no file of weights."""
    import safetensors.numpy

    known, before = _exporters(), dict(_exporters())
    known.update((kind, lambda *_, **__: {"none": np.zeros(1)}) for kind in before)
    try:
        with attributes_set(safetensors.numpy, save_file=lambda *_, **__: None):
            yield
    finally:
        known.update(before)


def complete(plain, folder: Path, has_head: bool) -> None:
    """Adds to the configuration of an export what KerasHub does not write."""
    backbone = getattr(plain, "backbone", plain)
    more = dict(_COMPLETED.get(type(backbone).__name__, {}))
    if not has_head:
        more.pop("architectures", None)  # Transformers uses another class without a head.
    if more:
        file = folder / _CONFIG
        file.write_text(json.dumps(more | json.loads(file.read_text("utf-8")), indent=2), "utf-8")
