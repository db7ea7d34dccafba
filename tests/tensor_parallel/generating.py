"""`generate` with unlike prompts, with samplers that have no seed, and where it cannot be."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.tensor_parallel.families import causal_lm, changed, scope

__all__ = ["odd_prompts", "other_prompts", "unseeded"]

TIME = 12


def _model(options: dict | None, sampler: str):
    """A small Llama with sharp logits, split where there are tensor ranks."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    with scope(options):
        model = causal_lm("Llama", length=TIME)
        for place, variable in enumerate(model.trainable_variables):
            variable.assign(np.random.default_rng(place).normal(0, 0.5, variable.shape))
        changed(model, "Llama", (options or {}).get("mesh", {}).get("tensor", 1), None, None)
        model.compile(sampler=sampler)
    return model


def _asked(*prompts: list[int]) -> dict[str, np.ndarray]:
    """Prompts as a model without a preprocessor takes them."""
    ids = np.zeros((len(prompts), TIME), "int32")
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return {"token_ids": ids, "padding_mask": ids > 0}


def odd_prompts(options: dict | None = None) -> dict:
    """By the kind of the prompts: the tokens, or the class of the error."""
    model = _model(options, "greedy")
    short, long = [3, 4, 5], [7, 8, 2, 1, 1, 1]
    (free,) = np.array(model.generate(_asked(short), stop_token_ids=None)["token_ids"])
    at_once = (int(free[len(short)]),)
    cases = {
        "different lengths": (_asked(short, long), None),
        "stop at once": (_asked(short, short), at_once),
        "a list of stops": (_asked(short, long), list(at_once)),
        "full": (_asked([1] * TIME, [2] * TIME), None),
        "no rows": (_asked(), None),
        "empty": (_asked([]), None),
        "one empty": (_asked(short, []), None),
        "no tokenizer to end with": (_asked(short), "auto"),
    }
    found: dict[str, Any] = {}
    for name, (prompts, stops) in cases.items():
        try:
            found[name] = np.array(model.generate(prompts, stop_token_ids=stops)["token_ids"])
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            found[name] = type(error).__name__
    return found


def unseeded(options: dict) -> dict[str, np.ndarray]:
    """What a sampler draws that each rank seeds by itself: on ranks, and in the process alone."""
    from tfdist.testing import engine

    found = {}
    for name, where in (("together", options), ("alone", None)):
        model = _model(where, "greedy")
        # As in processes that nobody seeded.
        keras.utils.set_random_seed(100 + engine().rank)
        model.compile(sampler="top_k")
        tokens = model.generate(_asked([3, 4, 5], [7, 8, 2]), stop_token_ids=None)["token_ids"]
        found[name] = np.array(tokens)
    return found


def other_prompts(options: dict) -> str:
    """What is said of prompts that differ by rank."""
    from tfdist.testing import engine

    model = _model(options, "greedy")
    return _said(lambda: model.generate(_asked([3, 4, 1 + engine().rank]), stop_token_ids=None))


def _said(function) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return "accepted"
