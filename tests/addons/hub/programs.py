"""Presets that a plain process makes, loaded on ranks and saved again."""

from __future__ import annotations

import keras
import numpy as np

from benchmarks.measuring import peak_above
from tests.tensor_parallel.families import causal_lm, scope, whole

__all__ = [
    "loaded",
    "loaded_by_hub",
    "LARGE_PARAMETERS",
    "make_large_preset",
    "make_preset",
    "memory_of_loading",
    "saved_again",
    "values",
]


def make_preset(name: str, folder: str, dtype: str, parts: bool = False) -> dict:
    """Makes a preset of a small model, and returns its weights."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        model = causal_lm(name)
        for place, variable in enumerate(model.weights):
            variable.assign(np.random.default_rng(place).normal(size=variable.shape))
        model.save_to_preset(folder, max_shard_size=2e-6 if parts else 10)
    finally:
        keras.config.set_dtype_policy(before)
    return values(model.backbone)


def values(model) -> dict[str, np.ndarray]:
    """The global arrays, as float32."""
    return {path: value.astype("float32") for path, value in whole(model.weights).items()}


def loaded(folder: str, options: dict | None, **kwargs) -> tuple[dict, int, np.ndarray]:
    """The weights as ranks have them, the bytes of this rank's, and the outputs for a batch."""
    import tfdist

    keras.backend.clear_session()
    with scope(options):
        model = tfdist.load_preset(folder, preprocessor=None, **kwargs)
    from tfdist.backend.keras.attributes import stored_value

    held = sum(np.prod(stored_value(v).shape) * stored_value(v).dtype.size for v in model.weights)
    ids = np.arange(1, 7, dtype="int32")[None]
    outputs = model({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    return values(model.backbone), int(held), np.array(outputs).astype("float32")


def loaded_by_hub(folder: str, options: dict | None) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of what KerasHub's own `from_preset` loads in the scope, as it is and split."""
    import keras_hub

    import tfdist

    keras.backend.clear_session()
    ids = np.arange(1, 7, dtype="int32")[None]
    x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    with scope(options):
        model = keras_hub.models.CausalLM.from_preset(folder, preprocessor=None)
        before = np.array(model(x))
        for _ in range(2):  # The second call finds a model that is split, and changes nothing.
            model = tfdist.parallelize(model)
    return before, np.array(model(x))


def saved_again(folder: str, again: str, options: dict | None) -> None:
    """Loads a preset on ranks, and saves what was loaded."""
    import tfdist

    with scope(options):
        model = tfdist.load_preset(folder, preprocessor=None)
    model.save_to_preset(again)


def adapted(path: str, options: dict | None, loads: bool) -> dict:
    """Trains an adapter for two steps and saves it, or loads one; returns its values."""
    import tfdist

    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    with scope(options):
        model = causal_lm("Llama")
        if (options or {}).get("mesh"):
            tfdist.parallelize(model)
        if loads:
            model.backbone.load_lora_weights(path)
        else:
            model.backbone.enable_lora(2)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.5), loss, weighted_metrics=None)
            ids = np.random.default_rng(0).integers(1, 17, (4, 6)).astype("int32")
            x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
            model.fit(x, np.roll(ids, -1, axis=1), epochs=2, verbose=0)
            model.backbone.save_lora_weights(path)
    return {k: v for k, v in values(model.backbone).items() if "lora" in k}


def weights_reloaded(path: str, options: dict | None) -> dict:
    """The weights of a model with LoRA that is split before it reads a file; the same saved there."""
    import tfdist

    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    with scope(options):
        model = causal_lm("Llama")
        if options is None:
            model.save_weights(path)
        else:
            model = tfdist.parallelize(model)
            for variable in model.trainable_variables:
                variable.assign(keras.ops.zeros_like(variable))
            model.backbone.enable_lora(2)
            model.load_weights(path)
    return {k: v for k, v in values(model.backbone).items() if "lora" not in k}


#: Of the model below: both tables, 24 blocks, and the last norm.
LARGE_PARAMETERS = 50_257 * 1024 + 1024 * 1024 + 24 * 12_596_224 + 2048


def make_large_preset(folder: str, dtype: str) -> None:
    """A preset of a GPT-2 with 350 million parameters."""
    import keras_hub

    keras.backend.clear_session()
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=50_257,
        num_layers=24,
        num_heads=16,
        hidden_dim=1024,
        intermediate_dim=4096,
        max_sequence_length=1024,
        dtype=dtype,
    )
    backbone.save_to_preset(folder)
    keras.backend.clear_session()


def memory_of_loading(folder: str, options: dict, dtype: str) -> tuple[int, int, int]:
    """The bytes by which loading raises a rank's peak, those it keeps, and of the largest layer."""
    import gc

    import keras_hub

    import tfdist
    from tfdist.backend.keras.attributes import stored_value

    keras.backend.clear_session()
    gc.collect()
    with scope(options):
        grown, model = peak_above(
            lambda: tfdist.load_preset(folder, keras_hub.models.Backbone, dtype=dtype)
        )
    sizes = [tfdist.sharding.layout.global_shape(variable) for variable in model.weights]
    width = 2 if dtype == "bfloat16" else 4
    largest = max(int(np.prod(size)) for size in sizes) * width
    values = [stored_value(variable) for variable in model.weights]
    held = sum(int(np.prod(value.shape)) * value.dtype.size for value in values)
    return grown, held, largest
