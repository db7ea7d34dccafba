"""Attention of `models.gpt` on a GPU: whole while its scores fit, products in the policy's dtype, no 5-dim transposes."""

from __future__ import annotations

import pytest

from tests.gpu_like import programs
from tfdist.testing import RankPool


@pytest.fixture(scope="module")
def process():
    with RankPool(1, "local", threads=1) as found:
        yield found


@pytest.fixture(scope="module", params=[2048, 4096 * 4], ids=["whole", "blocks"])
def step(process, request):
    (found,) = process.run(programs.shapes_of, request.param, "mixed_bfloat16", timeout=200)
    return request.param, found


@pytest.mark.timeout(300)
def test_products_have_the_dtype_of_the_policy(step):
    _, operations = step
    products = [(kind, dtype, name) for kind, dtype, _, name in operations if "MatMul" in kind]
    assert products
    assert not [each for each in products if each[1] == "float32"]


def test_loops_are_only_for_scores_that_do_not_fit(step):
    length, operations = step
    assert any(kind in ("While", "StatelessWhile") for kind, *_ in operations) == (length > 2048)


def test_transposes_have_at_most_four_dims(step):
    length, operations = step
    ranks = [(rank, name) for kind, _, rank, name in operations if kind == "Transpose"]
    assert ranks
    if length == 2048:
        assert not [each for each in ranks if each[0] > 4]
