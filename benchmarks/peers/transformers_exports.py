"""transformers beside exports of tfdist: makes what the tests compare with, and reads what was exported.

    .peers/torch/bin/python benchmarks/peers/transformers_exports.py make tests/addons/hub/golden
    .peers/torch/bin/python benchmarks/peers/transformers_exports.py check FOLDER...

`make` writes a file for each family: a tiny model, and its logits as it is, with adapters, with the
matrices rounded to int8, and with both. A folder for `check` has the logits beside the model or the adapter of PEFT,
in `expected.npz`; a line says by how much those of transformers differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

KINDS = ("plain", "lora", "int8", "lora on int8")
RANK = 2
_SIZES = {
    "vocab_size": 19,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 32,
}
#: What `AutoConfig.for_model` is given, by the name of the file. Sequences are longer than windows.
FAMILIES = {
    "Llama3": ("llama", _SIZES | {"tie_word_embeddings": False}),
    "GPT2": (
        "gpt2",
        {
            "vocab_size": 19,
            "n_embd": 8,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 32,
            "n_inner": 32,
        },
    ),
    "Qwen": ("qwen2", _SIZES | {"tie_word_embeddings": True, "use_sliding_window": False}),
    "Mistral": ("mistral", _SIZES | {"tie_word_embeddings": False, "sliding_window": 4}),
    "Gemma": ("gemma", _SIZES | {"num_key_value_heads": 1, "head_dim": 2}),
    "Gemma3": (
        "gemma3_text",
        _SIZES | {"head_dim": 4, "sliding_window": 4, "query_pre_attn_scalar": 4},
    ),
}
_TOKENS = 7
_MATRICES = ("_proj.weight", "c_attn.weight", "c_fc.weight", "c_proj.weight")


def make(folder: Path) -> None:
    """Writes a file for each family."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (kind, sizes) in FAMILIES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        random = np.random.default_rng(7)
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        weights = {
            path: random.normal(0, 0.4, tuple(value.shape)).astype("float16")
            for path, value in model.state_dict().items()
            if not (tied and path == "lm_head.weight")
        }
        heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
        adapters = {}
        for layer in range(config.num_hidden_layers):
            for part, count in zip(
                ("query", "value"), (heads[0], heads[1] or heads[0]), strict=True
            ):
                size = getattr(config, "head_dim", None) or config.hidden_size // heads[0]
                a = random.normal(0, 0.4, (config.hidden_size, count, RANK))
                b = random.normal(0, 0.4, (RANK, size))
                adapters[f"{layer}/{part}"] = (a.astype("float16"), b.astype("float16"))
        ids = random.integers(1, config.vocab_size, (1, _TOKENS))
        logits = {}
        for case in KINDS:
            values = {path: value.astype("float32") for path, value in weights.items()}
            if "int8" in case:
                values = {path: _rounded(path, value) for path, value in values.items()}
            if "lora" in case:
                for place, (a, b) in adapters.items():
                    _add(values, place, a.astype("float32") @ b.astype("float32"))
            if tied:
                values["lm_head.weight"] = values[_table(values)]
            model.load_state_dict({path: torch.tensor(value) for path, value in values.items()})
            logits[case] = _logits(model, ids)
        described = json.loads(config.to_json_string())
        arrays: dict[str, Any] = {
            "config": json.dumps(described | {"architectures": [type(model).__name__]}),
            "tokens": ids.astype("int32"),
            **{f"weights/{path}": value for path, value in weights.items()},
            **{f"lora/{place}/a": a for place, (a, _) in adapters.items()},
            **{f"lora/{place}/b": b for place, (_, b) in adapters.items()},
            **{f"logits/{case}": value for case, value in logits.items()},
        }
        np.savez_compressed(folder / f"{name}.npz", **arrays)
        print(f"{name}: {(folder / f'{name}.npz').stat().st_size:,} bytes")


def check(folders: list[str]) -> None:
    """Compares the outputs of transformers with those beside each model."""
    for folder in map(Path, folders):
        expected = np.load(folder / "expected.npz")
        is_task = "logits" in expected
        kind = AutoModelForCausalLM if is_task else AutoModel
        if "base" in expected:
            base = kind.from_pretrained(str(expected["base"]))
            model = PeftModel.from_pretrained(base, folder).eval().float()
        else:
            model = kind.from_pretrained(folder).eval().float()
        found = _logits(model, expected["tokens"])
        apart = np.abs(found - expected["logits" if is_task else "outputs"]).max()
        print(
            json.dumps({"folder": str(folder), "apart": float(apart), "size": float(found.std())})
        )


def _table(values) -> str:
    (path,) = [path for path in values if path.endswith(("embed_tokens.weight", "wte.weight"))]
    return path


def _rounded(path: str, value: np.ndarray) -> np.ndarray:
    """A matrix as int8 has it: its largest entry of each output is 127."""
    if not path.endswith(_MATRICES):
        return value
    inputs = 0 if path.startswith("transformer.") else 1  # GPT-2's are [inputs, outputs].
    scale = 127 / (np.abs(value).max(inputs, keepdims=True) + 1e-7)
    return (np.round(value * scale) / scale).astype("float32")


def _add(values, place: str, product: np.ndarray) -> None:
    """Adds an adapter of [inputs, heads, size of a head]."""
    layer, part = place.split("/")
    added = product.reshape(product.shape[0], -1)
    path = f"transformer.h.{layer}.attn.c_attn.weight"
    if path in values:
        begin = {"query": 0, "value": 2}[part] * added.shape[1]
        values[path][:, begin : begin + added.shape[1]] += added
        return
    values[f"model.layers.{layer}.self_attn.{part[0]}_proj.weight"] += added.T


def _logits(model, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        outputs = model(torch.tensor(np.asarray(ids), dtype=torch.long))
    found = getattr(outputs, "logits", None)
    return (outputs.last_hidden_state if found is None else found).float().numpy()


if __name__ == "__main__":
    command, *places = sys.argv[1:]
    if command == "make":
        make(Path(places[0]))
    else:
        check(places)
