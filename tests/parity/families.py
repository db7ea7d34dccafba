"""KerasHub's families in small: made of a configuration, without a download, with a small head."""

from __future__ import annotations

import keras
import numpy as np

from tests.parity.feeding import Feed, Result, rng, run

__all__ = ["FAMILIES", "train_family"]

WORDS, LENGTH = 17, 6

_SIZE = {"vocabulary_size": WORDS, "num_layers": 2, "hidden_dim": 8, "intermediate_dim": 16}
_HEADS = _SIZE | {"num_heads": 2, "dropout": 0.0}
_POSITIONS = _HEADS | {"max_sequence_length": LENGTH}
_GROUPS = _SIZE | {"num_query_heads": 4, "num_key_value_heads": 2, "dropout": 0.0}
_GEMMA = _GROUPS | {"head_dim": 4}
_EXPERTS = _GROUPS | {"num_experts": 3, "top_k": 2}
_PATCHES = {
    "image_shape": (8, 8, 3),
    "patch_size": 4,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
}

#: By the name of the backbone, what it is made of.
FAMILIES: dict[str, dict] = {
    "Albert": _POSITIONS | {"embedding_dim": 6, "num_groups": 1, "num_inner_repetitions": 2},
    "Bart": _POSITIONS,
    "Bert": _POSITIONS,
    "Bloom": _HEADS,
    "DINOV2": _PATCHES
    | {"intermediate_dim": 16, "position_embedding_shape": (8, 8), "use_mask_token": False},
    "DebertaV3": _POSITIONS | {"bucket_size": 4},
    "DeiT": _PATCHES | {"intermediate_dim": 16},
    "DistilBert": _POSITIONS,
    "ESM": _POSITIONS,
    "Electra": {k: v for k, v in _POSITIONS.items() if k != "vocabulary_size"}
    | {"vocab_size": WORDS, "embedding_dim": 6},
    "FNet": _SIZE | {"dropout": 0.0, "max_sequence_length": LENGTH},
    "Falcon": _SIZE | {"num_attention_heads": 2},
    "GPT2": _POSITIONS,
    "GPTNeoX": _POSITIONS | {"rotary_percentage": 0.5},
    "Gemma": _GEMMA,
    "Gemma2": _GEMMA
    | {
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "attention_logit_soft_cap": 50.0,
        "final_logit_soft_cap": 30.0,
        "use_sliding_window_attention": True,
        "sliding_window_size": 4,
    },
    "Gemma3": _GEMMA | {"image_size": None, "use_sliding_window_attention": True},
    "GptOss": _EXPERTS | {"head_dim": 4},
    "Llama": _GROUPS,
    "Llama3": _GROUPS | {"tie_word_embeddings": True},
    "Mistral": _GROUPS,
    "Mixtral": _EXPERTS,
    "OPT": _POSITIONS,
    "Phi3": _GROUPS,
    "Qwen": _GROUPS,
    "Qwen3": _GEMMA,
    "Qwen3Moe": _EXPERTS | {"head_dim": 4, "moe_intermediate_dim": 8},
    "QwenMoe": _EXPERTS | {"moe_intermediate_dim": 8, "shared_expert_intermediate_dim": 8},
    "RWKV7": {
        "hidden_size": 8,
        "head_size": 4,
        "num_layers": 1,
        "vocabulary_size": WORDS,
        "intermediate_dim": 16,
        "gate_lora": 4,
        "mv_lora": 4,
        "aaa_lora": 4,
        "decay_lora": 4,
    },
    "Roberta": _POSITIONS,
    "RoformerV2": _HEADS | {"head_size": 4},
    "SmolLM3": {
        "vocabulary_size": WORDS,
        "hidden_dim": 8,
        "intermediate_dim": 16,
        "num_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_layer_enabled_list": [True, False],
        "layer_types": ["full_attention"] * 2,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": LENGTH,
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
    },
    "SwinTransformer": {
        "image_shape": (32, 32, 3),
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 4,
        "drop_path": 0.0,
    },
    "T5": _HEADS,
    "ViT": _PATCHES | {"mlp_dim": 16},
    "Whisper": _HEADS
    | {
        "num_mels": 5,
        "max_encoder_sequence_length": 2 * LENGTH,
        "max_decoder_sequence_length": LENGTH,
    },
    "XLMRoberta": _POSITIONS,
    "XLNet": _HEADS,
}
#: Names whose class is another's.
_CLASSES = {"Gemma2": "Gemma"}


def classifier(name: str):
    """The backbone, a mean over its last output, and a dense layer."""
    import keras_hub

    kind = getattr(keras_hub.models, f"{_CLASSES.get(name, name)}Backbone")
    backbone = kind(**FAMILIES[name])
    outputs = backbone.output
    if isinstance(outputs, dict):
        wanted = [key for key in outputs if "sequence" in key and "encoder" not in key]
        outputs = outputs[wanted[-1] if wanted else list(outputs)[-1]]
    if len(outputs.shape) > 2:
        axes = tuple(range(1, len(outputs.shape) - 1))
        outputs = keras.ops.mean(outputs, axis=axes)
    return keras.Model(backbone.input, keras.layers.Dense(3, name="classes")(outputs))


def rows_for(name: str, rows: int):
    """Inputs by what the backbone calls them."""
    random = rng()
    lengths = random.integers(3, LENGTH + 1, rows)
    if name == "XLNet":
        # In KerasHub a padded row of XLNet depends on the other rows of its batch.
        lengths[:] = LENGTH
    mask = (np.arange(LENGTH) < lengths[:, None]).astype("int32")
    ids = random.integers(1, WORDS, (rows, LENGTH)).astype("int32") * mask

    def fill(tensor):
        what = tensor.name
        if "mask" in what:
            return mask
        if "segment" in what:
            return (np.arange(LENGTH) >= 3).astype("int32") * mask
        if "features" in what:
            shape = [size or 2 * LENGTH for size in tensor.shape[1:]]
            return random.normal(size=(rows, *shape)).astype("float32")
        if len(tensor.shape) == 4:
            return random.normal(size=(rows, *tensor.shape[1:])).astype("float32")
        return ids

    inputs = classifier(name).input
    if isinstance(inputs, dict):
        return {key: fill(tensor) for key, tensor in inputs.items()}
    return fill(inputs)


def train_family(strategy, feed: Feed, *, name: str, optimizer: str) -> Result:
    """Three steps of a family."""
    x, y = rows_for(name, feed.rows), rng().integers(0, 3, feed.rows)
    kinds = {"sgd": lambda: keras.optimizers.SGD(0.05), "adam": lambda: keras.optimizers.Adam(1e-3)}
    compiled = lambda: {  # noqa: E731
        "optimizer": kinds[optimizer](),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }
    return run(strategy, feed, lambda: classifier(name), compiled, x, y, epochs=1)
