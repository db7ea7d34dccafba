"""Text of KerasHub's language models: of one process, and of pipelines."""

from __future__ import annotations

import keras
import numpy as np

from tests.tensor_parallel.families import causal_lm, scope

__all__ = ["generated"]

LENGTH, LAYERS = 12, 4


def build(name: str, compiled: bool, layers: int = LAYERS):
    """A family's task with some blocks, and sharp logits, so that rounding changes no choice."""
    return causal_lm(name, length=LENGTH, compiled=compiled, num_layers=layers)


def values(place: int, shape) -> np.ndarray:
    return np.random.default_rng(place).normal(0, 0.5, shape)


def prompts() -> dict[str, np.ndarray]:
    ids = np.zeros((2, LENGTH), "int32")
    ids[:, :3] = [[3, 4, 5], [7, 8, 2]]
    ids[0, 3] = 9
    return {"token_ids": ids, "padding_mask": (ids > 0).astype("int32")}


def samplers() -> list:
    from keras_hub import samplers

    return [
        samplers.GreedySampler(),
        samplers.TopKSampler(k=5, seed=3),
        samplers.TopPSampler(p=0.8, k=5, seed=3),
        samplers.BeamSampler(num_beams=2),
        samplers.ContrastiveSampler(k=2, alpha=0.3),
    ]


def generated(name: str, options: dict | None = None, **pipeline) -> dict[str, np.ndarray]:
    """What a family makes of two prompts, by sampler; with `pipeline` the arguments of a pipeline."""
    from tfdist.pipeline import PipelineModel, deferred_weights

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    found = {}
    with scope(options):
        if options is None:
            task = model = build(name, True)
        else:
            with deferred_weights():
                task = build(name, False)
            model = PipelineModel(
                task, **{"num_microbatches": 2, "input_shape": (LENGTH,), **pipeline}
            )
        own = {id(variable) for variable in model.variables}
        for place, variable in enumerate(task.trainable_variables):
            if id(variable) in own:
                variable.assign(values(place, variable.shape))
        for sampler in samplers():
            model.compile(sampler=sampler)
            tokens = model.generate(prompts(), stop_token_ids=None)["token_ids"]
            found[type(sampler).__name__] = np.array(tokens)
    return found
