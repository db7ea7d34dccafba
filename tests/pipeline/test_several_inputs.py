"""Pipelines of models with several inputs and outputs, and of KerasHub's, against one process."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks, slow_but
from tests.pipeline import several

pytestmark = pytest.mark.timeout(600)

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]
HUB = ["GPT2-lm", "OPT-lm", "Bloom-lm", "Falcon-lm", "Llama-lm", "Mistral-lm", "Phi3-lm"]
HUB += ["Gemma-lm", "Gemma2-lm", "Gemma3-lm", "Qwen-lm", "Qwen3-lm", "GPTNeoX-lm"]
HUB += ["Bert", "Roberta", "ViT", "T5", "Bart", "DebertaV3", "Whisper"]


@functools.cache
def expected(pool, kind, **options):
    return pool.run(several.train, None, kind, **options, timeout=300)[0]


def compare(one, many):
    for rank in many:
        assert rank.history.keys() == one.history.keys()
        for name, right in one.history.items():
            np.testing.assert_allclose(rank.history[name], right, rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(rank.history["loss"][0], one.history["loss"][0], rtol=1e-6)
        assert rank.evaluation.keys() == one.evaluation.keys()
        for name, right in one.evaluation.items():
            np.testing.assert_allclose(rank.evaluation[name], right, rtol=1e-4, err_msg=name)
        tf.nest.assert_same_structure(rank.predictions, one.predictions)
        assert type(rank.predictions) is type(one.predictions)
        for found, right in zip(
            *map(tf.nest.flatten, (rank.predictions, one.predictions)), strict=True
        ):
            np.testing.assert_allclose(found, right, atol=1e-5, rtol=1e-4)
        assert rank.own_variables < len(one.weights)
        for found, right in zip(rank.weights, one.weights, strict=True):
            np.testing.assert_allclose(found, right, atol=1e-5)


def check(pool, one_process, mesh, kind, *, pipeline, **options):
    plain = {
        name: value for name, value in options.items() if name not in ("recompute", "parallelize")
    }
    one = expected(one_process, kind, **plain)
    many = pool.run(several.train, mesh, kind, pipeline=pipeline, **options, timeout=480)
    compare(one, many)
    return many


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("kind", several.HAND_MADE)
def test_hand_made_models(pool, one_process, kind):
    check(pool, one_process, {"pipeline": 2}, kind, pipeline={})


@on_ranks(("horovod", 2))
@pytest.mark.parametrize("kind", slow_but(["GPT2-lm"], HUB))
def test_models_of_keras_hub(pool, one_process, kind):
    check(pool, one_process, {"pipeline": 2}, kind, pipeline={})
