"""KerasHub's exports to the files of transformers: whole weights of fine-tuned models, written once.

KerasHub's exporters read the layers of a model. On a rank these have parts, and some layers of a
fine-tuned model are read without adapters, or as codes without scales. Here the exporters read a plain
model of the same weights.
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
from tfdist.step.local_steps import global_parameters
from tfdist.strategies.keras_patches.saving import write_once
from tfdist.utils import checks

#: The module of the functions that KerasHub's public methods call. A program may call the first one
#: itself.
_MODULE = "keras_hub.src.utils.transformers.export.hf_exporter"
_INSTEAD = "Save it with `save_to_preset`, which keeps all of it."
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

_exporting = threading.local()


def exporting_patches(models) -> tuple[Patch, ...]:
    """The patches, where `models` is `keras_hub.models`."""
    if not hasattr(models.Backbone, "export_to_transformers"):
        return ()  # Before 0.22 it does not exist.
    functions = importlib.import_module(_MODULE)
    return (
        Patch(models.Backbone, "export_to_transformers", ("self", "path"), _export),
        Patch(models.CausalLM, "export_to_transformers", ("self", "path"), _export),
        Patch(functions, "export_to_safetensors", ("keras_model", "path"), _export),
        Patch(functions, "export_backbone", ("backbone", "path", "include_lm_head"), _export),
        # The exporters of a tokenizer and of a preprocessor call it.
        Patch(functions, "export_tokenizer", ("tokenizer", "path"), _export_tokenizer),
    )


def _export(self, path, *args, dequantize: bool = False, original: Callable, **kwargs):
    """Exports a plain model; every rank calls it, and the chief writes the files.

    Args:
        original: KerasHub's function.
        self: The task, or the backbone.
        path: The folder.
        *args: Arguments of the original.
        dequantize: Whether to write a quantized model as floats.
        **kwargs: Keyword arguments of the original.

    Raises:
        ImportError: The package `safetensors` is not installed.
        ValueError: The model is quantized, and `dequantize` is not set; or the file would be that of
            another model.
    """
    if getattr(_exporting, "under_way", False):
        return original(self, path, *args, **kwargs)
    folder = Path(checks.path("path", path))
    checks.boolean("dequantize", dequantize)
    modes = _check(self, dequantize)
    before = _outputs(self) if modes else None
    # For a backbone, `include_lm_head` comes after the path.
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

    # Errors and the watchdog show collective calls by this name.
    write.__name__ = getattr(original, "__name__", "export_to_transformers")
    return write_once(self, original=write)


def _export_tokenizer(tokenizer, path, *, original: Callable):
    """Exports a tokenizer, on each rank that calls it, to the same files.

    KerasHub renames some of them, so two ranks in the same folder would conflict.
    """
    if getattr(_exporting, "under_way", False):
        return original(tokenizer, path)
    with _whole_files(Path(checks.path("path", path))) as new:
        return original(tokenizer, str(new))


@contextlib.contextmanager
def _whole_files(folder: Path) -> Iterator[Path]:
    """A folder for new files, which replace the earlier ones only when all of them are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as new:
        yield Path(new)
        for file in sorted(Path(new).iterdir()):
            os.replace(file, folder / file.name)


def _check(model, dequantize: bool) -> list[str]:
    """Checks that the export would be correct; returns the model's quantization modes."""
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError(
            "`export_to_transformers` requires the package safetensors, which KerasHub does not install. "
            "Run: pip install safetensors."
        )
    backbone = getattr(model, "backbone", model)
    kind = type(backbone).__name__
    known = importlib.import_module(_MODULE).MODEL_EXPORTERS
    if kind not in known:
        raise ValueError(
            f"KerasHub can only export models with {', '.join(sorted(known))}. Received: `{model.name}` with "
            f"{kind}. {_INSTEAD}"
        )
    for requires, received in _not_written(kind, backbone):
        raise ValueError(
            f"KerasHub's export of {kind} requires {requires}; otherwise the file would be that of another "
            f"model. Received: {received}. {_INSTEAD}"
        )
    modes = quantization_modes(model)
    if modes and not dequantize:
        raise ValueError(
            "`export_to_transformers` requires weights of floats. Received: "
            f"`{model.name}`, quantized to {' and '.join(modes)}. Pass dequantize=True to export "
            "dequantized floats, or save it with `save_to_preset`."
        )
    if modes:
        check_mergeable(model)
    return modes


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


def _complete(plain, folder: Path, has_head: bool) -> None:
    backbone = getattr(plain, "backbone", plain)
    more = dict(_COMPLETED.get(type(backbone).__name__, {}))
    if not has_head:
        more.pop("architectures", None)  # Transformers uses another class without a head.
    if more:
        file = folder / _CONFIG
        file.write_text(json.dumps(more | json.loads(file.read_text("utf-8")), indent=2), "utf-8")


def _outputs(model) -> np.ndarray | None:
    """The outputs for a row of tokens; None if the model cannot be called, as on a pipeline."""
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
    """Logs the effect of the quantization, which also rounds the inputs of products."""
    words = "outputs were not compared, because no rank can call the quantized model"
    if before is not None and after is not None:
        apart, size = np.abs(after - before).max(), before.std()
        words = (
            f"outputs for {before.shape[1]} tokens differ by at most {apart:.3g} from those of the "
            f"quantized model, whose standard deviation is {size:.3g}"
        )
    logging.warning(
        "tfdist: exported the dequantized floats of %s; %s.", " and ".join(modes), words
    )
