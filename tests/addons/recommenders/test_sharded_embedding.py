"""`ShardedEmbedding`: on ranks it trains as `keras.layers.Embedding` does in one process."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.addons.recommenders import embedding_programs
from tests.conftest import on_ranks, slow_but
from tests.strategies import programs
from tfdist import Mesh

#: Of three tables.
ROWS, COLUMNS, TABLE, AUTO = (
    "rows rows rows",
    "columns columns columns",
    "table table table",
    "auto auto auto",
)
MIXED = "rows columns table"


def on_mesh(program, mesh, options):
    from tfdist.testing import strategy

    return program(strategy(mesh, **options))


def assert_close(found, wanted, tolerance: float):
    for own, reference in zip(found[:3], wanted[:3], strict=True):
        if isinstance(own, dict):
            # A strategy logs the loss scale, too.
            assert own.keys() >= reference.keys()
            own, reference = [own[name] for name in reference], list(reference.values())
        np.testing.assert_allclose(own, reference, rtol=tolerance, atol=tolerance)
    assert found[3].keys() == wanted[3].keys()
    for name, value in wanted[3].items():
        np.testing.assert_allclose(found[3][name], value, tolerance, tolerance, err_msg=name)


def check(pool, one_process, placement, mesh: Mesh, tolerance=1e-5, zero_stage=0, **options):
    plain = functools.partial(embedding_programs.train, **options)
    (wanted,) = one_process.run(programs.in_one_process, plain)
    sharded = functools.partial(plain, placement=placement)
    for found in pool.run(on_mesh, sharded, mesh, {"zero_stage": zero_stage}, timeout=400):
        assert_close(found, wanted, tolerance)


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("placement", slow_but([MIXED], [MIXED, ROWS, COLUMNS, TABLE, AUTO]))
@pytest.mark.parametrize("optimizer", slow_but(["adam"], ["sgd", "adam", "adagrad", "lion"]))
def test_trains_as_plain_keras_in_one_process(pool, one_process, placement, optimizer):
    check(pool, one_process, placement, Mesh(), optimizer=optimizer)


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam", "global_clipnorm": 0.05},
        {"optimizer": "sgd", "clipnorm": 0.02, "momentum": 0.9},
        {"optimizer": "adagrad", "clipvalue": 0.01},
        {"optimizer": "adam", "gradient_accumulation_steps": 3},
        {"optimizer": "sgd", "run_eagerly": True},
    ],
)
def test_with_zero_and_clipping_on_two_axes_of_rows(pool, one_process, zero_stage, options):
    # Of 41 rows in batches of 10 the last has one: three ranks of four have none.
    check(pool, one_process, MIXED, Mesh(data=2, expert=2), 2e-5, zero_stage=zero_stage, **options)


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 2))
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(pool, one_process, policy, optimizer):
    # Products of matrices of other sizes round differently: half a digit of bfloat16.
    tolerance = {"mixed_bfloat16": 2e-2, "mixed_float16": 4e-3}[policy]
    check(pool, one_process, MIXED, Mesh(), tolerance, policy=policy, optimizer=optimizer)


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("form", slow_but(["ragged"], ["ragged", "sparse", "dense"]))
@pytest.mark.parametrize("placement", slow_but(["rows columns"], ["rows columns", "table rows"]))
def test_bags_of_any_size(pool, one_process, form, placement):
    plain = functools.partial(embedding_programs.lookups, placement=placement)
    (wanted, gradients) = one_process.run(programs.in_one_process, plain, form="ragged")[0]
    found = pool.run(on_mesh, functools.partial(plain, form=form), Mesh(), {}, timeout=400)
    for name, value in wanted.items():
        rows = np.concatenate([vectors[name] for vectors, _ in found])
        np.testing.assert_allclose(rows, value, 1e-6, 1e-6, err_msg=name)
    for _, whole in found:
        for name, value in gradients.items():
            np.testing.assert_allclose(whole[name], value, 1e-5, 1e-5, err_msg=name)


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("where", slow_but(["above"], ["above", "below"]))
@pytest.mark.parametrize("run_eagerly", slow_but([False], [False, True]))
def test_an_id_outside_of_its_vocabulary(pool, where, run_eagerly):
    program = functools.partial(embedding_programs.refusal, where=where, run_eagerly=run_eagerly)
    messages = pool.run(on_mesh, program, Mesh(), {}, timeout=400)
    for message, ranks in messages:
        assert "history" in message and "vocabulary" in message, message
        assert ("-7" if where == "below" else "23") in message, message
        assert ranks == len(messages)


@on_ranks(("horovod", 2), slow=[("horovod", 4), ("tensorflow", 3)])
@pytest.mark.parametrize("placement", slow_but(["rows columns"], ["rows columns", "table rows"]))
@pytest.mark.parametrize("kind", ["rows", "unique"])
def test_a_lookup_costs_what_the_formula_says(pool, placement, kind):
    program = functools.partial(embedding_programs.traffic, placement=placement, kind=kind)
    for counted, formula in pool.run(on_mesh, program, Mesh(), {}, timeout=400):
        assert counted == formula
