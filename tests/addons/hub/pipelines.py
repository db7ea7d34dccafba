"""Fine-tuning of a preset as a pipeline, and alike on one process with plain KerasHub."""

from __future__ import annotations

import keras
import numpy as np

from benchmarks.measuring import peak_above
from tests.tensor_parallel.families import causal_lm, scope, whole
from tfdist.backend.keras.attributes import stored_value

__all__ = ["make_preset", "memory_of_loading", "read", "tuned"]

WORDS, LENGTH, ROWS, STEPS = 17, 6, 8, 10


def make_preset(name: str, folder: str) -> None:
    """Makes a preset of a small model."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(7)
    causal_lm(name, num_layers=4).save_to_preset(folder)


def batch() -> tuple[dict, np.ndarray]:
    ids = np.random.default_rng(0).integers(1, WORDS, (ROWS, LENGTH)).astype("int32")
    return {"token_ids": ids, "padding_mask": np.ones_like(ids)}, np.roll(ids, -1, axis=1)


def tuned(
    folder: str,
    options: dict | None,
    saves: str,
    *,
    lora: str | None = "before",
    loads: str | None = None,
    **pipeline,
) -> tuple[list[float], dict[str, np.ndarray]]:
    """Ten steps of SGD on a preset; then an adapter, a preset and text.

    Args:
        folder: The preset.
        options: The mesh, and what the strategy takes; None for plain KerasHub.
        saves: A folder for a preset, beside which the adapter lies.
        lora: Whether adapters are put in "before" or "after" the pipeline is made; None: all
            weights are trained.
        loads: A file of adapters to begin with.
        **pipeline: For `PipelineModel`.

    Returns:
        The losses, and the weights by place and path.
    """
    import keras_hub

    import tfdist

    keras.backend.clear_session()
    keras.utils.set_random_seed(7)

    def adapt(task):
        if loads:
            task.backbone.load_lora_weights(loads)
        else:
            task.backbone.enable_lora(2)

    with scope(options):
        # A sampler of `compile` would draw a seed before the adapters do.
        load = keras_hub.models.CausalLM.from_preset if options is None else tfdist.load_preset
        task = load(folder, preprocessor=None, compile=False)
        if lora == "before":
            adapt(task)
        model = task
        if options is not None:
            arguments = {"num_microbatches": 2, "input_shape": (LENGTH,), **pipeline}
            model = tfdist.pipeline.PipelineModel(task, **arguments)
        if lora == "after":
            adapt(task)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss, weighted_metrics=None, sampler="greedy")
    x, y = batch()
    history = model.fit(x, y, batch_size=ROWS, epochs=STEPS, shuffle=False, verbose=0)
    task.save_to_preset(saves)
    if lora:
        task.backbone.save_lora_weights(f"{saves}.lora.h5")
    return history.history["loss"], whole(task.backbone.weights)


def read(folder: str, adapter: str | None) -> dict[str, np.ndarray]:
    """The weights of a preset as plain KerasHub reads it, with an adapter's."""
    import keras_hub

    keras.backend.clear_session()
    task = keras_hub.models.CausalLM.from_preset(folder, preprocessor=None)
    if adapter:
        task.backbone.load_lora_weights(adapter)
    return whole(task.backbone.weights)


def memory_of_loading(folder: str, options: dict, dtype: str) -> tuple[int, int, int]:
    """The bytes by which a pipeline of a preset raises a rank's peak, those kept, the largest weight."""
    import gc

    import keras_hub

    import tfdist

    keras.backend.clear_session()
    gc.collect()

    def load():
        backbone = tfdist.load_preset(folder, keras_hub.models.Backbone, dtype=dtype)
        return tfdist.pipeline.PipelineModel(backbone, num_microbatches=4, input_shape=(128,))

    with scope(options):
        grown, model = peak_above(load)
    width = 2 if dtype == "bfloat16" else 4
    largest = max(int(np.prod(v.shape)) for v in model.chain_model.weights) * width
    values = [stored_value(variable) for variable in model.weights]
    held = sum(int(np.prod(value.shape)) * value.dtype.size for value in values)
    return grown, held, largest
