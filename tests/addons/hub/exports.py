"""Models that transformers has made, fine-tuned on ranks and exported, and read again by KerasHub.

`golden/` has for each family a tiny model, adapters, and the logits of transformers: of the model as it
is, with the adapters, with its matrices rounded to int8, and with both. They are made by
`benchmarks/peers/transformers_exports.py`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import types
from pathlib import Path
from unittest import mock

import keras
import numpy as np

from tests.tensor_parallel.families import scope

__all__ = ["FAMILIES", "KINDS", "LAYOUTS", "exported", "golden", "reimported", "write_checkpoint"]

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = ["Llama3", "GPT2", "Qwen", "Mistral", "Gemma", "Gemma3"]
KINDS = ["plain", "lora", "int8", "lora on int8"]
FILES = {"config.json", "model.safetensors", "generation_config.json"}
#: By name, what the strategy takes.
LAYOUTS: dict[str, dict] = {
    "one": {},
    "tensor": {"mesh": {"data": 1, "tensor": 2}},
    "zero": {"zero_stage": 3},
    "pipeline": {"mesh": {"pipeline": 2}},
}


def golden(name: str) -> dict[str, np.ndarray]:
    """What the file of a family holds."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def write_checkpoint(name: str, folder: Path) -> str:
    """Writes the model of a family as transformers does."""
    from safetensors.numpy import save_file

    found = golden(name)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(str(found["config"]))
    weights = {
        path.removeprefix("weights/"): value.astype("float32")
        for path, value in found.items()
        if path.startswith("weights/")
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def is_product(layer) -> bool:
    return isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense))


def load(name: str, folder: str, kind: str, dtype: str = "float32"):
    """The task of a checkpoint, quantized and with the adapters where the kind says so."""
    import keras_hub

    task = keras_hub.models.CausalLM.from_preset(folder, preprocessor=None, dtype=dtype)
    if "int8" in kind:
        task.backbone.quantize("int8", filters=is_product)
    if "lora" in kind:
        task.backbone.enable_lora(2)
        found = golden(name)
        adapters = {path: value for path, value in found.items() if path.startswith("lora/")}
        wanted = [v for v in task.backbone.trainable_variables if v.name.startswith("lora_")]
        assert len(wanted) == len(adapters)
        # In the order of the blocks, queries before values, A before B.
        for variable, (path, value) in zip(wanted, sorted(adapters.items()), strict=True):
            if name.startswith("Gemma") and path.endswith("/a"):
                value = value.swapaxes(0, 1)  # Its kernels begin with the heads.
            assert tuple(variable.shape) == value.shape
            variable.assign(value.astype("float32"))
    return task


@contextlib.contextmanager
def messages():
    """What tfdist tells the user."""
    from absl import logging

    found: list[str] = []
    with mock.patch.object(logging, "warning", lambda text, *args: found.append(text % args)):
        yield found


def exported(
    name: str, checkpoint: str, folder: str, options: dict, kinds=KINDS, dtype: str = "float32"
) -> dict[str, list[str]]:
    """Exports a model of each kind, by its layout; returns what was said, by kind.

    Where a model is quantized, the export without `dequantize` is to be refused.
    """
    import tfdist

    said = {}
    mesh = options.get("mesh", {})
    for kind in kinds:
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        with scope(options):
            task = load(name, checkpoint, kind, dtype)
            if mesh.get("tensor", 1) > 1:
                tfdist.parallelize(task)
            if mesh.get("pipeline", 1) > 1:
                tfdist.pipeline.PipelineModel(task, num_microbatches=1, input_shape=(7,))
        place = f"{folder}/{kind}"
        with messages() as found:
            if "int8" in kind:
                try:
                    task.export_to_transformers(place)
                except ValueError as error:
                    found.append(str(error))
                task.export_to_transformers(place, dequantize=True)
            else:
                task.export_to_transformers(place)
        said[kind] = found
    return said


def raised_by_export(
    name: str, checkpoint: str, folder: str, options: dict
) -> tuple[str, list[str]]:
    """The class of what the export of a plain model raises, and its notes."""
    try:
        exported(name, checkpoint, folder, options, ["plain"])
    except Exception as error:
        return type(error).__name__, list(getattr(error, "__notes__", []))
    return "nothing", []


def exported_otherwise(name: str, checkpoint: str, folder: str, options: dict) -> np.ndarray:
    """Exports a model with adapters by KerasHub's functions, and its backbone, whose outputs it returns."""
    from keras_hub.src.utils.transformers.export import hf_exporter

    import tfdist

    keras.backend.clear_session()
    with scope(options):
        task = tfdist.parallelize(load(name, checkpoint, "lora"))
    hf_exporter.export_to_safetensors(task, f"{folder}/function")
    # As a program has it that imported it before the first model was made.
    hf_exporter.export_to_safetensors.__wrapped__(task, f"{folder}/early")
    task.backbone.export_to_transformers(f"{folder}/backbone")
    return logits(task.backbone, golden(name)["tokens"])


def exported_quantized(
    name: str, checkpoint: str, folder: str, options: dict, mode: str, block_size: int | None
) -> np.ndarray:
    """Exports a model that is quantized with its tables, and returns its logits."""
    import tfdist

    keras.backend.clear_session()
    config = None
    if mode == "int4":
        config = keras.quantizers.Int4QuantizationConfig(block_size=block_size)
    with scope(options):
        task = load(name, checkpoint, "plain")
        task.backbone.quantize(mode, config=config)
        if options.get("mesh"):
            tfdist.parallelize(task)
    task.export_to_transformers(folder, dequantize=True)
    return logits(task, golden(name)["tokens"])


def reimported(name: str, folder: str, dtype: str = "float32") -> np.ndarray:
    """The logits of an exported model, as plain KerasHub reads it, for the tokens of `golden`."""
    import keras_hub
    from keras_hub.src.utils.transformers import convert_mistral

    keras.backend.clear_session()
    # KerasHub 0.32 rounds the weights of Mistral to float16 when it reads them.
    before = convert_mistral.np
    convert_mistral.np = types.SimpleNamespace(**vars(np) | {"float16": np.float32})
    try:
        task = keras_hub.models.CausalLM.from_preset(folder, preprocessor=None, dtype=dtype)
    finally:
        convert_mistral.np = before
    return logits(task, golden(name)["tokens"])


def logits(task, ids: np.ndarray) -> np.ndarray:
    return np.asarray(task({"token_ids": ids, "padding_mask": np.ones_like(ids)}))


def config_of(folder: str) -> dict:
    return json.loads((Path(folder) / "config.json").read_text())


def trained(name: str, checkpoint: str, folder: str, options: dict | None, dtype: str = "float32"):
    """Trains adapters for two epochs, and exports at the end of each; the logits then, in one process."""
    import tfdist

    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    mesh = (options or {}).get("mesh", {})
    with scope(options):
        model = task = load(name, checkpoint, "lora", dtype)
        if mesh.get("tensor", 1) > 1:
            tfdist.parallelize(task)
        if mesh.get("pipeline", 1) > 1:
            model = tfdist.pipeline.PipelineModel(task, num_microbatches=1, input_shape=(7,))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss, weighted_metrics=None)
    ids = np.random.default_rng(0).integers(1, 18, (5, 7)).astype("int32")
    x, y = {"token_ids": ids, "padding_mask": np.ones_like(ids)}, np.roll(ids, -1, axis=1)
    exports = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: task.export_to_transformers(f"{folder}/{epoch}")
    )
    model.fit(x, y, batch_size=5, epochs=2, callbacks=[exports], shuffle=False, verbose=0)
    # Inside the scope too, where new weights would be parts.
    with scope(options):
        task.backbone.export_to_transformers(f"{folder}/backbone")
    return logits(task, golden(name)["tokens"]) if options is None else None


def exported_shards(checkpoint: str, folder: str, options: dict) -> None:
    """Exports a model that was read from a folder in one file, and again in several."""
    import tfdist

    keras.backend.clear_session()
    with scope(options):
        task = tfdist.load_preset(checkpoint, preprocessor=None, compile=False)
        if options.get("mesh", {}).get("pipeline", 1) > 1:
            tfdist.pipeline.PipelineModel(task, num_microbatches=1, input_shape=(7,))
    task.export_to_transformers(f"{folder}/one")
    for most in (10**9, 1500):
        task.export_to_transformers(f"{folder}/several", max_shard_bytes=most)


def exported_adapter(name: str, checkpoint: str, folder: str, options: dict, dtype="float32"):
    """Exports the adapters of a model, and the model with them merged."""
    import tfdist
    from tfdist.addons.hub import export_peft

    keras.backend.clear_session()
    mesh = options.get("mesh", {})
    with scope(options):
        task = load(name, checkpoint, "lora", dtype)
        tfdist.addons.hub.train_only_adapters(task)
        if mesh.get("tensor", 1) > 1:
            tfdist.parallelize(task)
        if mesh.get("pipeline", 1) > 1:
            tfdist.pipeline.PipelineModel(task, num_microbatches=1, input_shape=(7,))
    export_peft(task, f"{folder}/peft")
    task.export_to_transformers(f"{folder}/merged")


def unverified(checkpoint: str, folder: str) -> tuple[bool, str]:
    """Whether this environment lacks torch, and what `verify_export` then says."""
    from tfdist.addons.hub import verify_export

    keras.backend.clear_session()
    task = load("Llama3", checkpoint, "plain")
    task.export_to_transformers(folder)
    try:
        verify_export(task, folder)
    except ImportError as error:
        return True, str(error)
    return importlib.util.find_spec("torch") is None, ""


def verified(checkpoint: str, folder: str, python: str, dtype: str) -> tuple[float, str, str]:
    """What is found of an export, of one with the heads of a query in another order, and of no export."""
    from safetensors.numpy import load_file, save_file

    from tfdist.addons.hub import verify_export

    keras.backend.clear_session()
    task = load("Llama3", checkpoint, "plain", dtype)
    task.export_to_transformers(f"{folder}/exported")
    right = verify_export(task, f"{folder}/exported", python=python) or 0.0
    file = Path(folder, "exported", "model.safetensors")
    weights = load_file(file)
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = np.ascontiguousarray(weights[name][::-1])
    save_file(weights, file, metadata={"format": "pt"})
    said = []
    for place in ("exported", "none"):
        try:
            verify_export(task, f"{folder}/{place}", python=python)
        except ValueError as error:
            said.append(str(error))
    wrong, none = said
    return right, wrong, none


def adapter_refused(checkpoint: str, folder: str) -> list[str]:
    """What is said of models that have no adapters, or more than these."""
    from tfdist.addons.hub import export_peft

    said = []
    for kind in ("plain", "lora"):
        keras.backend.clear_session()
        try:
            export_peft(load("Qwen", checkpoint, kind), folder)
        except ValueError as error:
            said.append(str(error))
    return said


def tensors(folder: str) -> dict[str, np.ndarray]:
    """What a file of an export holds."""
    from safetensors.numpy import load_file

    return load_file(Path(folder) / "model.safetensors")


def tokenizers_exported(folder: str, options: dict, times: int) -> None:
    """Exports a tokenizer and a preprocessor, on each rank at once, and a task with both."""
    import keras_hub

    models = keras_hub.models
    with scope(options):
        # The first model in a scope has KerasHub's methods wrapped.
        backbone = models.GPT2Backbone(4, 1, 1, 4, 16, max_sequence_length=4)
    vocabulary = {"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}
    tokenizer = models.GPT2Tokenizer(vocabulary=vocabulary, merges=["a b"])
    preprocessor = models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=4)
    for number in range(times):
        tokenizer.export_to_transformers(f"{folder}/tokenizer-{number}")
        preprocessor.export_to_transformers(f"{folder}/preprocessor-{number}")
    with scope(options):
        task = models.GPT2CausalLM(backbone=backbone, preprocessor=preprocessor)
    task.export_to_transformers(f"{folder}/task")


def refused(kinds: list[str], options: dict, folder: str) -> dict[str, str]:
    """What is said where an export would be that of another model."""
    import keras_hub

    models = keras_hub.models
    sizes = {"vocabulary_size": 8, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1}
    sizes |= {"hidden_dim": 4, "intermediate_dim": 8}

    def quantized(mode):
        backbone = models.Llama3Backbone(**sizes)
        for layer in filter(is_product, backbone._flatten_layers()):
            layer.quantize(mode)
        return backbone

    builds = {
        "gemma 7b": lambda: models.GemmaBackbone(**sizes | {"num_key_value_heads": 2}, head_dim=2),
        "gemma with wide heads": lambda: models.GemmaBackbone(**sizes, head_dim=4),
        "gemma 2": lambda: models.GemmaBackbone(**sizes, head_dim=2, use_post_ffw_norm=True),
        "gemma 3 without norms": lambda: models.Gemma3Backbone(
            **sizes, image_size=None, head_dim=2
        ),
        "windows of qwen": lambda: models.QwenBackbone(**sizes, use_sliding_window_attention=True),
        "gemma 4 that ends locally": lambda: models.Gemma4Backbone(
            **sizes, image_size=None, head_dim=2, use_sliding_window_attention=True
        ),
        "llama 2": lambda: models.LlamaBackbone(**sizes),
        "float8": lambda: quantized("float8"),
        "int8": lambda: quantized("int8"),
    }
    found = {}
    for kind in kinds:
        keras.backend.clear_session()
        with scope(options):
            backbone = builds[kind]()
        try:
            backbone.export_to_transformers(
                folder, **{"dequantize": True} if "float" in kind else {}
            )
        except ValueError as error:
            found[kind] = str(error)
        else:
            found[kind] = "accepted"
    return found


def with_biases(
    name: str, checkpoint: str, adapter: str, options: dict, loads: bool
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Saves an adapter of a model whose biases have changed, or reads one; what it trains, by path."""
    import tfdist
    from tfdist.sharding import whole_value

    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    mesh = options.get("mesh", {})
    with scope(options), messages() as said:
        task = load(name, checkpoint, "lora")
        variables = task.backbone.trainable_variables
        for place, variable in enumerate(variables):
            values = np.random.default_rng(place).normal(size=variable.shape)
            variable.assign(np.zeros_like(values) if loads else values)
        if mesh.get("tensor", 1) > 1:
            tfdist.parallelize(task)
        if mesh.get("pipeline", 1) > 1:
            tfdist.pipeline.PipelineModel(task, num_microbatches=1, input_shape=(7,))
        if loads:
            task.backbone.load_lora_weights(adapter)
        else:
            task.backbone.save_lora_weights(adapter)
    return {v.path: whole_value(v).numpy() for v in variables}, said
