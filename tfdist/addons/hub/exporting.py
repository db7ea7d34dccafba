"""KerasHub's exports to the files of transformers: whole weights with what was trained, written once.

KerasHub's exporters read the layers of a model. On a rank these hold parts, and of a fine-tuned model
some are read without its adapters, or as codes without their scales. Here they read a plain model of
the same weights.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.addons.hub.merging import check_mergeable, merged_model, quantization_modes
from tfdist.backend.keras.patching import Patch
from tfdist.sharding.layout import layout_of
from tfdist.strategies.keras_patches.local_steps import global_parameters
from tfdist.strategies.keras_patches.saving import write_once
from tfdist.utils import checks

#: Where the functions are that KerasHub's public methods call, when they are called. A program may call
#: the first one itself.
_MODULE = "keras_hub.src.utils.transformers.export.hf_exporter"
_INSTEAD = "Save it by `save_to_preset`, which keeps all of it."
_CONFIG = "config.json"

#: What KerasHub's exporters write nothing of, and would have to: by the backbone, values of its
#: configuration for which the file is right all the same.
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
        "layer_norm_epsilon": (1e-6,),  # Its blocks have this one, whatever the configuration says.
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
#: Those whose heads together are as wide as the layer.
_NARROW_HEADS = ("GemmaBackbone", "MistralBackbone")
#: Keys that KerasHub's exporters leave out of `config.json`: transformers does without them, while vLLM
#: and KerasHub's own `from_preset` look for them.
_COMPLETED: dict[str, dict[str, Any]] = {
    "GPT2Backbone": {"architectures": ["GPT2LMHeadModel"]},
    "GemmaBackbone": {"architectures": ["GemmaForCausalLM"]},
    "QwenBackbone": {
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": False,
        "sliding_window": None,
    },
}

_exporting = threading.local()


def exporting_patches(models) -> tuple[Patch, ...]:
    """What is wrapped, where `models` is `keras_hub.models`."""
    if not hasattr(models.Backbone, "export_to_transformers"):
        return ()  # Before 0.22 there is none.
    functions = importlib.import_module(_MODULE)
    return (
        Patch(models.Backbone, "export_to_transformers", ("self", "path"), _export),
        Patch(models.CausalLM, "export_to_transformers", ("self", "path"), _export),
        Patch(functions, "export_to_safetensors", ("keras_model", "path"), _export),
        Patch(functions, "export_backbone", ("backbone", "path", "include_lm_head"), _export),
        # That of a tokenizer and of a preprocessor call it.
        Patch(functions, "export_tokenizer", ("tokenizer", "path"), _export_tokenizer),
    )


def _export(self, path, *args, dequantize: bool = False, original: Callable, **kwargs):
    """Every rank calls it, and the chief writes what plain KerasHub would of a plain model.

    Args:
        original: KerasHub's.
        self: The task, or the backbone.
        path: The folder.
        *args: For the original.
        dequantize: Whether a quantized model is written as the floats that it stands for.
        **kwargs: For the original.

    Raises:
        ImportError: The package `safetensors` is missing.
        ValueError: The model is quantized, and `dequantize` is not given; or the file would be that of
            another model.
    """
    if getattr(_exporting, "under_way", False):
        return original(self, path, *args, **kwargs)
    folder = Path(checks.path("path", path))
    checks.boolean("dequantize", dequantize)
    modes = _check(self, dequantize)
    before = _outputs(self) if modes else None
    # Of a backbone alone `include_lm_head` comes behind the path.
    has_head = hasattr(self, "backbone") or any(args[:1]) or kwargs.get("include_lm_head", False)

    def write(model):
        plain: Any = merged_model(model)
        with _whole_files(folder) as new:
            _exporting.under_way = True
            try:
                original(plain, str(new), *args, **kwargs)
            finally:
                _exporting.under_way = False
            _complete(plain, new, has_head)
        if modes:
            _tell_difference(modes, before, _outputs(plain))

    # Errors and the watchdog show what ranks do together by its name.
    write.__name__ = getattr(original, "__name__", "export_to_transformers")
    return write_once(self, original=write)


def _export_tokenizer(tokenizer, path, *, original: Callable):
    """A tokenizer is no rank's, so each rank that calls it writes the same files.

    KerasHub renames some of them, and two ranks would take them away from each other.
    """
    if getattr(_exporting, "under_way", False):
        return original(tokenizer, path)
    with _whole_files(Path(checks.path("path", path))) as new:
        return original(tokenizer, str(new))


@contextlib.contextmanager
def _whole_files(folder: Path) -> Iterator[Path]:
    """A folder for new files, which are moved when all of them are there: those before stay whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as new:
        yield Path(new)
        for file in sorted(Path(new).iterdir()):
            os.replace(file, folder / file.name)


def _check(model, dequantize: bool) -> list[str]:
    """Refuses what would be written wrongly; returns how the model is quantized."""
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError(
            "`export_to_transformers` requires the package safetensors, which KerasHub does not install: "
            "pip install safetensors."
        )
    backbone = getattr(model, "backbone", model)
    kind = type(backbone).__name__
    known = importlib.import_module(_MODULE).MODEL_EXPORTERS
    if kind not in known:
        raise ValueError(
            f"KerasHub exports models with {', '.join(sorted(known))}. Received: `{model.name}` with "
            f"{kind}. {_INSTEAD}"
        )
    for requires, received in _not_written(kind, backbone):
        raise ValueError(
            f"KerasHub's export of {kind} requires {requires}, or the file would be that of another "
            f"model. Received: {received}. {_INSTEAD}"
        )
    modes = quantization_modes(model)
    if modes and not dequantize:
        raise ValueError(
            "`export_to_transformers` writes weights of floats. Received: "
            f"`{model.name}`, quantized to {' and '.join(modes)}. Pass dequantize=True, for the floats "
            "that it stands for, or save it by `save_to_preset`."
        )
    if modes:
        check_mergeable(model)
    return modes


def _not_written(kind: str, backbone) -> Iterator[tuple[str, str]]:
    """What the exporter of a backbone gets wrong of this one: what it requires, and what there is."""
    for name, right in _NOT_WRITTEN.get(kind, {}).items():
        value = getattr(backbone, name, right[0])
        if value not in right:
            yield f"{name}={right[0]}", f"{name}={value}"
    # Gemma's heads are written in another order where they are wider than the layer, and the
    # configuration of Mistral has another width of them.
    width = getattr(backbone, "head_dim", None) if kind in _NARROW_HEADS else None
    if width and backbone.num_query_heads * width != backbone.hidden_dim:
        found = f"{backbone.num_query_heads} * {width} and hidden_dim={backbone.hidden_dim}"
        yield "num_query_heads * head_dim = hidden_dim", found
    # Whatever the configuration says, transformers takes it so.
    if kind == "Gemma4Backbone" and backbone.layer_types[-1] != "full_attention":
        yield "a last layer of full_attention", backbone.layer_types[-1]


def _complete(plain, folder: Path, has_head: bool) -> None:
    backbone = getattr(plain, "backbone", plain)
    more = dict(_COMPLETED.get(type(backbone).__name__, {}))
    if not has_head:
        more.pop("architectures", None)  # Transformers has another class for it.
    if more:
        file = folder / _CONFIG
        file.write_text(json.dumps(more | json.loads(file.read_text("utf-8")), indent=2), "utf-8")


def _outputs(model) -> np.ndarray | None:
    """The outputs for a row of tokens; None where the model cannot be called, as on a pipeline."""
    inputs = model.input
    known = isinstance(inputs, dict) and set(inputs) == {"token_ids", "padding_mask"}
    if not known or any(layout_of(variable).stage is not None for variable in model.variables):
        return None
    backbone = getattr(model, "backbone", model)
    length = min(16, getattr(backbone, "max_sequence_length", None) or 16)
    ids = np.random.default_rng(0).integers(0, backbone.vocabulary_size, (1, length), "int32")
    with global_parameters(model):
        outputs = model({"token_ids": ids, "padding_mask": np.ones_like(ids)}, training=False)
    return tf.cast(keras.tree.flatten(outputs)[0], tf.float32).numpy()


def _tell_difference(modes: list[str], before, after) -> None:
    """What a user of the export sees of the quantization: it also rounds the inputs of products."""
    words = "outputs were not compared, for no rank can call the quantized model"
    if before is not None and after is not None:
        apart, size = np.abs(after - before).max(), before.std()
        words = (
            f"outputs for {before.shape[1]} tokens differ by {apart:.3g} at most from those of the "
            f"quantized model, whose deviation is {size:.3g}"
        )
    logging.warning(
        "tfdist: exported the floats that %s stands for; %s.", " and ".join(modes), words
    )
