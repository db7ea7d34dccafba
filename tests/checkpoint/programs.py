"""Training that is saved on one mesh and goes on, on another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tests.models.gpt_programs import BATCH, build, scope, text

if TYPE_CHECKING:
    from tfdist.checkpoint.manifest import Manifest
    from tfdist.checkpoint.storage import Storage

STEPS = 3


#: What a GPT with experts has beside the sizes of the others.
EXPERTS = {
    "num_experts": 4,
    "experts": {"bias_rate": 0.01, "balance_over": "sequence", "z_loss": 0.01},
}


def model_on(mesh: dict | None, experts: bool = False, optimizer: str = "built", **more: Any):
    """A GPT on a mesh, and the data that it learns.

    Args:
        mesh: The mesh; None for a model without a strategy.
        experts: Whether it has experts.
        optimizer: "built", "new" for one that is not built yet, or "none" for a model that is not compiled.
        **more: Sizes.
    """
    from tfdist import layers
    from tfdist.pipeline import PipelineModel, deferred_weights

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    sizes: dict[str, Any] = {"num_layers": 4, **(EXPERTS if experts else {}), **more}
    with scope(mesh):
        if mesh is not None and mesh.get("pipeline", 1) > 1:
            with deferred_weights():
                model = build(**sizes)
            model = PipelineModel(model, num_microbatches=2)
        else:
            model = build(**sizes)
        if optimizer != "none":
            rule = keras.optimizers.AdamW(3e-3, weight_decay=0.1, global_clipnorm=1.0)
            model.compile(rule, layers.VocabParallelCrossEntropy(61))
        if optimizer == "built":
            rule.build(model.trainable_variables)
    return model, tf.data.Dataset.from_tensor_slices(text(STEPS * BATCH, 61)).batch(BATCH)


def losses_of(model, data) -> list[float]:
    history = model.fit(data.repeat(), steps_per_epoch=1, epochs=STEPS, verbose=0)
    return history.history["loss"]


def trained_and_saved(mesh: dict | None, folder: str, experts: bool = False) -> str:
    """The path of a checkpoint of some steps of training."""
    from tfdist import checkpoint

    model, data = model_on(mesh, experts)
    losses_of(model, data)
    return checkpoint.save(folder, model, step=STEPS, state={"epoch": 1})


def restored(mesh: dict | None, paths: dict[str, str], folder: str, experts: bool = False) -> dict:
    """For each checkpoint: where it was saved again, and the losses of further steps."""
    from tfdist import checkpoint

    model, data = model_on(mesh, experts)
    found = {}
    for name, path in paths.items():
        manifest = checkpoint.restore(path, model)
        assert (manifest.step, manifest.state) == (STEPS, {"epoch": 1})
        again = checkpoint.save(f"{folder}/{name}", model, step=STEPS)
        found[name] = (again, losses_of(model, data))
    return found


def resumed(mesh: dict | None, path: str, optimizer: str) -> list[float]:
    """The losses of further steps of a model into which a checkpoint was restored."""
    from tfdist import checkpoint, layers

    model, data = model_on(mesh, optimizer=optimizer)
    checkpoint.restore(path, model)
    if optimizer == "none":
        with scope(mesh):
            model.compile(None, layers.VocabParallelCrossEntropy(61))
        return [model.evaluate(data, verbose=0)]
    return losses_of(model, data)


def arrays_of(path: str) -> dict[str, np.ndarray]:
    """All global arrays of a checkpoint."""
    from tfdist.checkpoint.reading import Reader
    from tfdist.checkpoint.storage import Storage

    storage = Storage(path)
    manifest = _manifest_in(storage)
    reader = Reader(storage, manifest)
    return {
        name: reader.read(name, [tuple(slice(0, size) for size in shape)])[0]
        for name, (shape, _) in manifest.arrays.items()
    }


def state_of(path: str) -> dict:
    """What else a checkpoint holds."""
    from tfdist.checkpoint.storage import Storage

    return _manifest_in(Storage(path)).state


def _manifest_in(storage: Storage) -> Manifest:
    from tfdist.checkpoint.manifest import Manifest

    manifest = Manifest.read(storage)
    assert manifest is not None, f"{storage.path} has no manifest"
    return manifest
