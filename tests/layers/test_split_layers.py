"""Penalties, second derivatives, ids and heads of split layers, as in one process or refused."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.layers import split_programs as programs

TWO = {"data": 1, "tensor": 2}
KINDS = on_ranks(("horovod", 2), slow=[("tensorflow", 2)])


def check(found, right) -> None:
    (losses, weights), (expected, values) = found, right
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for path, value in values.items():
        np.testing.assert_allclose(weights[path], value, atol=1e-5, err_msg=path)


@KINDS
@pytest.mark.parametrize("sequence_parallel", slow_but([True], [False, True]))
def test_a_penalty_counts_once(pool, one_process, sequence_parallel):
    (right,) = one_process.run(programs.penalized, None)
    for found in pool.run(programs.penalized, TWO, sequence_parallel):
        check(found, right)


@KINDS
def test_a_head_that_is_used_twice_joins_its_logits(pool, one_process):
    (right,) = one_process.run(programs.shared_head, None)
    for found in pool.run(programs.shared_head, TWO):
        check(found, right)


@on_ranks(("horovod", 2), slow=[("horovod", 4)])
def test_logits_stay_split_in_a_pipeline(pool):
    mesh = {"data": 1, "tensor": 2, "pipeline": pool.num_ranks // 2}
    found = pool.run(programs.logits_in_a_pipeline, mesh, timeout=200)
    assert {size for sizes in found for size in sizes} == {7}  # Of 13, padded to 14.


@KINDS
@pytest.mark.parametrize("value", slow_but([-1], [-1, -programs.WORDS]))
def test_negative_ids_count_from_the_end_of_a_table(pool, one_process, value):
    (right,) = one_process.run(programs.with_an_id, None, "inputs", value)
    for found in pool.run(programs.with_an_id, TWO, "inputs", value):
        check(found, right)


@KINDS
@pytest.mark.parametrize(
    ("where", "value", "chunk_size"),
    [
        ("inputs", programs.WORDS, None),  # In the padding of the last rank.
        pytest.param("inputs", -programs.WORDS - 1, None, marks=pytest.mark.slow),
        pytest.param("labels", programs.WORDS, None, marks=pytest.mark.slow),
        ("labels", -1, None),
        pytest.param("labels", -1, 16, marks=pytest.mark.slow),
    ],
)
def test_ids_outside_of_the_vocabulary_raise_an_error(pool, one_process, where, value, chunk_size):
    args = where, value, chunk_size
    assert one_process.run(programs.with_an_id, None, *args) == ["InvalidArgumentError"]
    assert pool.run(programs.with_an_id, TWO, *args) == ["InvalidArgumentError"] * 2


@KINDS
def test_the_loss_has_second_derivatives(pool, one_process):
    (right,) = one_process.run(programs.hessian_of_the_loss, None)
    for found in pool.run(programs.hessian_of_the_loss, TWO):
        for got, expected in zip(found, right, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9)


@KINDS
def test_features_that_need_the_whole_layer_are_refused(pool):
    for found in pool.run(programs.refused, TWO):
        for name, said in found.items():
            assert "is not supported for a layer that is split" in said, name
