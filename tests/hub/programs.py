"""Presets that a plain process makes, loaded on ranks and saved again."""

from __future__ import annotations

import resource

import keras
import numpy as np

from tests.tensor_parallel.families import causal_lm, scope, whole

__all__ = ["loaded", "make_preset", "saved_again", "values"]


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
    from tfdist.keras_internals.attributes import stored_value

    held = sum(np.prod(stored_value(v).shape) * stored_value(v).dtype.size for v in model.weights)
    ids = np.arange(1, 7, dtype="int32")[None]
    outputs = model({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    return values(model.backbone), int(held), np.array(outputs).astype("float32")


def saved_again(folder: str, again: str, options: dict | None) -> None:
    """Loads a preset on ranks, enables LoRA, and saves what was loaded."""
    import tfdist
    from tfdist.hub import save_preset

    with scope(options):
        model = tfdist.load_preset(folder, preprocessor=None)
    save_preset(model, again)


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
