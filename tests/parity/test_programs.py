"""The one promise: training on any number of ranks gives the weights of a single process."""

from __future__ import annotations

import functools

import pytest

from tests.conftest import on_ranks, slow_but
from tests.strategies import programs

KINDS = [("horovod", 3), ("tensorflow", 2)]
MORE_KINDS = [(engine, n) for engine in ("horovod", "tensorflow") for n in (1, 2, 3, 4)]
MODELS = ["mlp", "convnet", "two_in_two_out"]
CASES = [(model, optimizer) for model in MODELS for optimizer in ("sgd", "adamw")]
#: What the sum of a thousand roundings may come to. AdamW divides by small second moments.
TOLERANCE = {"sgd": 1e-5, "adamw": 1e-4}


def program(model: str):
    if model == "two_in_two_out":
        return programs.train_two_in_two_out
    return functools.partial(programs.train_images, build=model)


@functools.cache
def reference(one_process, model: str, optimizer: str, rows: int):
    return one_process.run(
        programs.in_one_process, program(model), optimizer_name=optimizer, rows=rows
    )[0]


def check(pool, one_process, model, optimizer, rows):
    expected = reference(one_process, model, optimizer, rows)
    results = pool.run(
        programs.on_rank, program(model), optimizer_name=optimizer, rows=rows, timeout=240
    )
    programs.assert_same(results, expected, weights=TOLERANCE[optimizer])


slow = pytest.mark.slow


@on_ranks(*KINDS, slow=[kind for kind in MORE_KINDS if kind not in KINDS])
@pytest.mark.parametrize(("model", "optimizer"), slow_but([("convnet", "adamw")], CASES))
def test_uneven_batches(pool, one_process, model, optimizer):
    check(pool, one_process, model, optimizer, programs.UNEVEN_ROWS)


@slow
@on_ranks(*MORE_KINDS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("model", MODELS)
def test_even_batches(pool, one_process, model, optimizer):
    check(pool, one_process, model, optimizer, programs.EVEN_ROWS)
