"""Transformers from configurations of other libraries, and the sizes of well-known models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfdist.addons.planner.models import Transformer
from tfdist.utils import checks

_MOST = 10**9

#: The names of sizes in configurations of KerasHub's backbones and of other libraries.
_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_layers", "num_hidden_layers", "n_layer"),
    "width": ("hidden_dim", "hidden_size", "n_embd"),
    "heads": ("num_query_heads", "num_heads", "num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "hidden": ("intermediate_dim", "intermediate_size", "n_inner"),
    "vocabulary": ("vocabulary_size", "vocab_size"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "top_k": ("top_k", "num_experts_per_tok"),
    "tied": ("tie_word_embeddings",),
}
_LENGTHS = ("max_sequence_length", "n_positions", "max_position_embeddings")
#: Families without a gate in the feed-forward network, and with biases in norms and dense layers.
_PLAIN = ("gpt2", "gptneox", "gpt_neox", "opt", "bloom", "bert", "roberta", "falcon", "phi")


def from_config(config: Mapping[str, Any], *, length: int | None = None) -> Transformer:
    """Create a transformer from the configuration of a KerasHub backbone or a `config.json`.

    Args:
        config: The result of `backbone.get_config()`, or the content of a `config.json`. A nested
            `config`, as in files of presets, is used instead.
        length: Tokens of a sample; None for the maximum of the configuration.

    Raises:
        ValueError: A size is missing; the message names it.
    """
    checks.instance("config", config, Mapping, "a dict, as of `backbone.get_config()`")
    checks.integer("length", length, minimum=1, maximum=_MOST, optional=True)
    kind = str(config.get("class_name", config.get("model_type", config.get("name", ""))))
    inner = config.get("config")
    if isinstance(inner, Mapping):
        config = inner
    found: dict[str, Any] = {}
    for argument, names in _NAMES.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is not None:
            found[argument] = value
    kind = (kind or str(config.get("name", ""))).lower()
    is_plain = any(name in kind for name in _PLAIN)
    longest = next((config[name] for name in _LENGTHS if config.get(name) is not None), None)
    missing = [name for name in ("layers", "width", "heads", "vocabulary") if name not in found]
    if missing or (length is None and longest is None):
        lacks = [_NAMES[name][0] for name in missing] or ["length="]
        raise ValueError(
            f"`config` of a transformer must have {', '.join(lacks)}. Received: "
            f"config={checks.shown(dict(config))}."
        )
    return Transformer(
        **{"tied": is_plain or "gemma" in kind, **found},
        length=length or int(longest),  # type: ignore[arg-type]
        gated=not is_plain,
        use_bias=is_plain,
        norm_bias=is_plain,
        learned_positions=is_plain,
    )


def _llama(layers: int, width: int, heads: int, hidden: int) -> dict[str, Any]:
    return {
        "layers": layers,
        "width": width,
        "heads": heads,
        "kv_heads": 8,
        "hidden": hidden,
        "vocabulary": 128_256,
        "length": 8192,
        "gated": True,
        "tied": False,
        "learned_positions": False,
        "use_bias": False,
        "norm_bias": False,
        "blockwise": True,
    }


def _gpt(layers: int, width: int, heads: int, length: int = 2048) -> dict[str, Any]:
    return {
        "layers": layers,
        "width": width,
        "heads": heads,
        "vocabulary": 50_257,
        "length": length,
    }


#: Sizes of well-known models: Radford et al. 2019; Brown et al. 2020, table 2.1; Llama team 2024
#: (arXiv:2407.21783), table 3; Jiang et al. 2024 (arXiv:2401.04088).
KNOWN: dict[str, dict[str, Any]] = {
    "gpt2": _gpt(12, 768, 12, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 1024),
    "gpt3-13b": _gpt(40, 5120, 40),
    "gpt3-175b": _gpt(96, 12_288, 96),
    "llama3-8b": _llama(32, 4096, 32, 14_336),
    "llama3-70b": _llama(80, 8192, 64, 28_672),
    "llama3-405b": _llama(126, 16_384, 128, 53_248),
    "mixtral-8x7b": {
        **_llama(32, 4096, 32, 14_336),
        "vocabulary": 32_000,
        "experts": 8,
        "top_k": 2,
    },
}
