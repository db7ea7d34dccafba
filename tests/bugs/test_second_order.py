"""Losses that are made of gradients.

The story: a network trained on its own second derivatives ended under ZeRO-3 in "nodes in a cycle", or
trained while TensorFlow wrote that it could not sort the graph: the gradient of a gradient took what waited
for it. Where it takes gradients of parameters, their reduction had no gradient at all.
"""

from __future__ import annotations

import functools

import pytest

from tests.bugs.comparing import check, on_mesh
from tests.bugs.second_order_programs import PROGRAMS
from tests.conftest import on_ranks, slow_but
from tfdist import Mesh
from tfdist.testing import RankPool

CASES = [(name, stage) for name in PROGRAMS for stage in (0, 1, 2, 3)]


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("horovod", 3)])
@pytest.mark.parametrize(("name", "stage"), slow_but([("Pinn", 3), ("HessianVector", 3)], CASES))
def test_as_one_process(pool, one_process, name, stage):
    # Second derivatives of a normalization are large.
    tolerance = 1e-3 if name.endswith("Attention") else 2e-5
    check(pool, one_process, PROGRAMS[name], tolerance=tolerance, zero_stage=stage)


def logged(program, mesh: Mesh, options: dict) -> str:
    """What a rank's TensorFlow writes meanwhile; it does not go through Python."""
    import os
    import tempfile

    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            on_mesh(program, mesh, options)
        finally:
            os.dup2(before, 2)
            os.close(before)
        file.seek(0)
        return file.read().decode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
@pytest.mark.parametrize("name", ["Pinn", "PenaltyAgain", "OnePointAttention"])
def test_tensorflow_sorts_the_graph(engine, name):
    program = functools.partial(PROGRAMS[name])
    with RankPool(2, engine, environment={"TF_CPP_MIN_LOG_LEVEL": "0"}) as pool:
        for said in pool.run(logged, program, Mesh(), {"zero_stage": 3}, timeout=200):
            assert "topological" not in said and "cycle" not in said, said
