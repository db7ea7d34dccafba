"""Layers of experts on any mesh train as a dense loop over experts in one process."""

from __future__ import annotations

import pytest

from tests.conftest import on_ranks, slow_but
from tests.layers.expert_programs import program
from tests.strategies.test_axes import check
from tfdist import Mesh

MESHES_OF_TWO = {
    "expert": Mesh(data=1, expert=2),
    "data": Mesh(data=2),
    "tensor": Mesh(data=1, tensor=2),
}
MESHES_OF_FOUR = {
    "expert": Mesh(data=1, expert=4),
    "data x expert": Mesh(data=2, expert=2),
    "expert x tensor": Mesh(data=1, expert=2, tensor=2),
}


def meshes(which: dict, quick: list[str]) -> list:
    return [
        pytest.param(mesh, id=name, marks=() if name in quick else pytest.mark.slow)
        for name, mesh in which.items()
    ]


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("mesh", meshes(MESHES_OF_TWO, ["expert"]))
@pytest.mark.parametrize("zero_stage", slow_but([0], [0, 1, 3]))
def test_as_a_dense_loop(pool, one_process, mesh, zero_stage):
    # Of 11 rows in batches of 5 the last has one row: a rank has none.
    check(pool, one_process, program(bias_rate=0.01), mesh, zero_stage=zero_stage)


@on_ranks(("horovod", 4), slow=[("tensorflow", 4)])
@pytest.mark.parametrize("mesh", meshes(MESHES_OF_FOUR, ["expert x tensor"]))
@pytest.mark.parametrize("zero_stage", slow_but([0], [0, 1, 3]))
def test_on_two_axes(pool, one_process, mesh, zero_stage):
    check(pool, one_process, program(use_bias=True), mesh, zero_stage=zero_stage)
