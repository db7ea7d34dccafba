"""The memory of ranks that load, export and train, in models whose tensors can be seen in it."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import keras
import numpy as np

from benchmarks.measuring import peak_above
from tests.addons.hub.programs import scope

SIZES = {"num_layers": 4, "num_query_heads": 8, "num_key_value_heads": 4}
WORDS, WIDTH, INSIDE = 16_384, 512, 2048
#: The bytes of the largest tensor: the table.
LARGEST = WORDS * WIDTH * 4
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": INSIDE,
    "num_hidden_layers": SIZES["num_layers"],
    "num_attention_heads": SIZES["num_query_heads"],
    "num_key_value_heads": SIZES["num_key_value_heads"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "head_dim": WIDTH // SIZES["num_query_heads"],
}


def make_folder(folder: str) -> int:
    """A folder as transformers has it, with random weights; returns their bytes."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)
    keys = WIDTH // SIZES["num_query_heads"] * SIZES["num_key_value_heads"]
    shapes = {
        "model.embed_tokens": (WORDS, WIDTH),
        "lm_head": (WORDS, WIDTH),
        "model.norm": (WIDTH,),
    }
    for number in range(SIZES["num_layers"]):
        block = f"model.layers.{number}"
        shapes |= {
            f"{block}.self_attn.q_proj": (WIDTH, WIDTH),
            f"{block}.self_attn.k_proj": (keys, WIDTH),
            f"{block}.self_attn.v_proj": (keys, WIDTH),
            f"{block}.self_attn.o_proj": (WIDTH, WIDTH),
            f"{block}.mlp.gate_proj": (INSIDE, WIDTH),
            f"{block}.mlp.up_proj": (INSIDE, WIDTH),
            f"{block}.mlp.down_proj": (WIDTH, INSIDE),
            f"{block}.input_layernorm": (WIDTH,),
            f"{block}.post_attention_layernorm": (WIDTH,),
        }
    tensors = {
        f"{name}.weight": random.normal(0, 0.02, shape).astype("float32")
        for name, shape in shapes.items()
    }
    place = Path(folder)
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def loaded_and_exported(folder: str, output: str, options: dict, most: int) -> tuple[int, int, int]:
    """The bytes by which loading and exporting raise a rank's peak, and those that it holds."""
    # Modules are not a part of what loading and exporting need.
    import safetensors.numpy  # noqa: F401
    from keras_hub.src.utils.transformers.export import hf_exporter  # noqa: F401

    import tfdist
    from tfdist.backend.keras.attributes import stored_value

    keras.backend.clear_session()
    gc.collect()
    mesh = options.get("mesh", {})

    def load():
        task = tfdist.load_preset(folder, preprocessor=None, compile=False)
        if mesh.get("pipeline", 1) > 1:
            tfdist.pipeline.PipelineModel(task, num_microbatches=1, input_shape=(8,))
        return task

    with scope(options):
        loading, task = peak_above(load)
    values = [stored_value(variable) for variable in task.variables]
    held = sum(int(np.prod(v.shape)) * v.dtype.size for v in values if v is not None)
    gc.collect()
    exporting, _ = peak_above(lambda: task.export_to_transformers(output, max_shard_bytes=most))
    return loading, held, exporting


def trained(kind: str, options: dict) -> int:
    """The bytes by which training adapters raises a rank's peak, from 16 rows: conversations, or 8 pairs."""
    import keras_hub

    import tfdist
    from tfdist.addons.hub.chat.data import chat_batches
    from tfdist.addons.hub.chat.rows import Row
    from tfdist.addons.hub.preferences.data import Pairs
    from tfdist.launch.finetune.preferences import PreferenceOptions

    rows, length = 16, 256
    keras.utils.set_random_seed(0)
    with scope(options):
        backbone = keras_hub.models.Llama3Backbone(
            WORDS, hidden_dim=WIDTH, intermediate_dim=INSIDE, **SIZES
        )
        task = keras_hub.models.Llama3CausalLM(backbone=backbone, preprocessor=None, compile=False)
        backbone.enable_lora(8)
        tfdist.addons.hub.train_only_adapters(backbone)
        if options.get("mesh", {}).get("tensor", 1) > 1:
            tfdist.parallelize(task)
    random = np.random.default_rng(0)
    found = [
        Row(
            tuple(random.integers(1, WORDS, length).tolist()),
            tuple(place >= length // 2 for place in range(length)),
            f"row {number}",
        )
        for number in range(rows)
    ]

    def train() -> None:
        if kind == "conversations":
            loss = tfdist.layers.VocabParallelCrossEntropy(WORDS, "sum", chunk_size=512)
            data = chat_batches(found, rows, length=length).dataset
        else:
            given = PreferenceOptions(preference=kind)
            pairs = Pairs.of(list(zip(found[::2], found[1::2], strict=True)), length)
            pairs = given.referenced(pairs, task, backbone, rows=rows, chunk_size=512)
            loss, data = given.loss(WORDS, 512), pairs.batches(rows // 2)
        with task.distribute_strategy.scope():
            task.compile(keras.optimizers.Adam(1e-4), loss, weighted_metrics=None)
        task.fit(data, epochs=2, verbose=0)

    gc.collect()
    grown, _ = peak_above(train)
    return grown
