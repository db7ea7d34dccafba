"""Folders as transformers writes them, loaded on ranks."""

from __future__ import annotations

import keras
import numpy as np

from tests.addons.hub.exports import golden, logits
from tests.tensor_parallel.families import scope


def imported(name: str, folder: str, options: dict | None) -> tuple[np.ndarray, int]:
    """The logits of a folder's model, and the bytes of this rank's weights."""
    import tfdist
    from tfdist.backend.keras.attributes import stored_value

    keras.backend.clear_session()
    mesh = (options or {}).get("mesh", {})
    with scope(options):
        model = task = tfdist.load_preset(folder, preprocessor=None, dtype="float32")
        ids = golden(name)["tokens"]
        if mesh.get("pipeline", 1) > 1:
            model = tfdist.pipeline.PipelineModel(
                task, num_microbatches=1, input_shape=(ids.shape[1],)
            )
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss)
    held = [stored_value(variable) for variable in model.weights]
    held_bytes = sum(int(np.prod(v.shape)) * v.dtype.size for v in held if v is not None)
    if model is task:
        return logits(task, ids), held_bytes
    x = {"token_ids": ids, "padding_mask": np.ones_like(ids)}
    return model.predict(x, batch_size=len(ids), verbose=0), held_bytes


def said_of(folder: str, options: dict | None) -> str:
    """What is said of a folder that cannot be loaded."""
    import tfdist

    try:
        with scope(options):
            tfdist.load_preset(folder, preprocessor=None)
    except (ImportError, ValueError) as error:
        return str(error)
    return "loaded"
