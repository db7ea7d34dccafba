"""`ShardedEmbedding`: on ranks it trains as `keras.layers.Embedding` does in one process."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.layers import embedding_programs
from tests.strategies import programs
from tfdist import Mesh

#: Of three tables.
ROWS, COLUMNS, TABLE, AUTO = "rows rows rows", "columns columns columns", "table table table", "auto auto auto"
MIXED = "rows columns table"


def on_mesh(program, mesh, options):
    from tfdist.testing import strategy

    return program(strategy(mesh, **options))


def assert_close(found, wanted, tolerance: float):
    for own, reference in zip(found[:3], wanted[:3], strict=True):
        if isinstance(own, dict):
            assert own.keys() == reference.keys()
            own, reference = list(own.values()), list(reference.values())
        np.testing.assert_allclose(own, reference, rtol=tolerance, atol=tolerance)
    assert found[3].keys() == wanted[3].keys()
    for name, value in wanted[3].items():
        np.testing.assert_allclose(found[3][name], value, tolerance, tolerance, err_msg=name)


def check(pool, one_process, placement, mesh: Mesh, tolerance=1e-5, zero_stage=0, **options):
    plain = functools.partial(embedding_programs.train, **options)
    (wanted,) = one_process.run(programs.in_one_process, plain)
    sharded = functools.partial(plain, placement=placement)
    for found in pool.run(on_mesh, sharded, mesh, {"zero_stage": zero_stage}, timeout=200):
        assert_close(found, wanted, tolerance)


@on_ranks(("horovod", 2), slow=[("tensorflow", 3)])
@pytest.mark.parametrize("placement", slow_but([MIXED], [MIXED, ROWS, COLUMNS, TABLE, AUTO]))
@pytest.mark.parametrize("optimizer", slow_but(["sgd", "adam"], ["sgd", "adam", "adagrad", "lion"]))
def test_trains_as_plain_keras_in_one_process(pool, one_process, placement, optimizer):
    check(pool, one_process, placement, Mesh(), optimizer=optimizer)
