"""Text of KerasHub's language models: of one process, and of pipelines."""

from __future__ import annotations

import os

import keras
import numpy as np

from tests.tensor_parallel.families import causal_lm, scope

__all__ = ["generated", "make_preset", "refusal", "written"]

LENGTH, LAYERS = 12, 4


def make_preset(name: str, folder: str) -> None:
    """Makes a preset of a family, with sharp logits, so that rounding changes no choice."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    # A configuration of KerasHub's Llama 3 does not keep that its embeddings are tied.
    changes = {"tie_word_embeddings": False} if name == "Llama3" else {}
    model = causal_lm(name, length=LENGTH, num_layers=LAYERS, **changes)
    for place, variable in enumerate(model.trainable_variables):
        variable.assign(np.random.default_rng(place).normal(0, 0.5, variable.shape))
    model.save_to_preset(folder)


def load(folder: str, options: dict | None, **pipeline):
    """The task of a preset; with a pipeline where there are ranks."""
    import keras_hub

    import tfdist

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    load = keras_hub.models.CausalLM.from_preset if options is None else tfdist.load_preset
    with scope(options):
        task = load(folder, preprocessor=None, compile=False)
        if options is None:
            return task, task
        arguments = {"num_microbatches": 2, "input_shape": (LENGTH,), **pipeline}
        return task, tfdist.pipeline.PipelineModel(task, **arguments)


def samplers(few: bool) -> list:
    from keras_hub import samplers

    greedy = samplers.GreedySampler()
    if few:
        return [greedy]
    return [
        greedy,
        samplers.TopKSampler(k=5, seed=3),
        samplers.TopPSampler(p=0.8, k=5, seed=3),
        samplers.BeamSampler(num_beams=2),
        samplers.ContrastiveSampler(k=2, alpha=0.3),
    ]


def generated(
    folder: str, options: dict | None = None, few: bool = False, eager: bool = False, **pipeline
) -> dict[str, np.ndarray]:
    """What a preset makes of two prompts, by sampler."""
    ids = np.zeros((2, LENGTH), "int32")
    ids[:, :3] = [[3, 4, 5], [7, 8, 2]]
    ids[0, 3] = 9
    prompts = {"token_ids": ids, "padding_mask": (ids > 0).astype("int32")}
    _, model = load(folder, options, **pipeline)
    some = samplers(few)
    if "Gemma3" in folder:
        # KerasHub itself cannot return that there are none, nor repeat its masks for beams.
        prompts["images"] = np.zeros((2, 0), "float32")
        some = some[:3]
    found = {}
    for sampler in some:
        model.compile(sampler=sampler, run_eagerly=eager)
        tokens = model.generate(dict(prompts), stop_token_ids=None)["token_ids"]
        found[type(sampler).__name__] = np.array(tokens)
    return found


def preprocessor():
    """One of letters, for a vocabulary of 17 words."""
    import keras_hub

    letters = ["<|endoftext|>", *"abcdefghijklmn", "Ġ", "ab"]
    tokenizer = keras_hub.models.GPT2Tokenizer(
        vocabulary={word: place for place, word in enumerate(letters)}, merges=["a b"]
    )
    return keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=LENGTH)


def written(folder: str, options: dict | None) -> list:
    """Texts from strings: by the pipeline and by its task, with the family's own sampler."""
    task, model = load(folder, options)
    task.preprocessor = preprocessor()
    model.compile(sampler="greedy")
    found = [
        model.generate(["abc d", "n"], max_length=9),
        task.generate("n", max_length=8, strip_prompt=True),
        task.generate(["abc d", "n"], stop_token_ids=(3, 7)),
    ]
    # Others of the same model, drawn from the same seed.
    model.compile(sampler=keras_sampler(4))
    found += [model.generate("n", max_length=10, stop_token_ids=None) for _ in range(2)]
    # And from none, for which each rank would draw its own.
    keras.utils.set_random_seed(os.getpid())
    model.compile(sampler="top_k")
    return [*found, model.generate(["n", "d"], stop_token_ids=None)]


def keras_sampler(seed: int):
    from keras_hub import samplers

    return samplers.RandomSampler(seed=seed)


def refusal(what: str) -> str:
    """What is said where a pipeline cannot generate."""
    from tests.pipeline.several import lm
    from tfdist.pipeline import PipelineModel

    keras.backend.clear_session()
    with scope({"mesh": {"pipeline": 2}}):
        if what == "model":
            layers = [keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(2)]
            model = PipelineModel(layers, num_microbatches=2)
        else:
            task = causal_lm("RWKV7", num_layers=4) if what == "program" else lm("GPT2")
            if what == "reads":

                def reading(self, token_ids, cache, index):
                    _ = self.backbone.transformer_layers[0].intermediate_dim
                    return stock.call_with_cache(self, token_ids, cache, index)

                stock = type(task)
                task = type("Reading", (stock,), {"call_with_cache": reading})(
                    task.backbone, preprocessor=None
                )
            model = PipelineModel(task, num_microbatches=2, input_shape=(LENGTH,))
            model.compile("sgd", "mse")
        ids = np.ones((2, 6), "int32")
        try:
            model.generate({"token_ids": ids, "padding_mask": ids}, stop_token_ids=None)
        except ValueError as error:
            return str(error)
    return "nothing was refused"
