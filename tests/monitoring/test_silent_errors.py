"""A bit that one rank gets wrong is found within some steps, named, and mended where it can be."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import on_ranks
from tests.monitoring import silent_programs

MESHES = {
    "data": {"data": 4},
    # Slices have a second copy along the data axis, whole variables along both.
    "mixed": {"data": 2, "tensor": 2},
    # Parameters are whole on all ranks.
    "zero": {"data": 4, "zero_stage": 1},
    # A shard of a whole variable has a second copy along the tensor axis.
    "shards": {"data": 2, "tensor": 2, "zero_stage": 3},
}
FAULTS = {
    "weights": {"step": 4, "what": "weights"},
    "gradient": {"step": 5, "what": "gradient"},
}
#: The gradient of a shard of which there is no second copy is wrong on all ranks alike.
SEEN = [
    pytest.param(mesh, fault, marks=[] if (mesh, fault) == ("data", "gradient") else pytest.mark.slow)
    for mesh in MESHES
    for fault in FAULTS
    if (mesh, fault) != ("zero", "gradient")
]


@on_ranks(("horovod", 4))
@pytest.mark.parametrize(("mesh", "fault"), SEEN)
def test_a_flipped_bit_is_transient(pool, mesh, fault):
    axes = MESHES[mesh]
    fault = {"rank": 2, "variable": "gamma", **FAULTS[fault]}
    found = pool.run(silent_programs.spoilt, axes, fault, every_steps=3, timeout=200)
    right = pool.run(silent_programs.spoilt, axes, None, every_steps=3, timeout=200)
    for rank, (one, other) in enumerate(zip(found, right, strict=True)):
        assert one["error"] is None and not other["said"], (one, other)
        assert len(one["said"]) == (rank == 0), one["said"]
        # Training went on as if nothing had happened.
        np.testing.assert_allclose(one["losses"], other["losses"], rtol=1e-5)
        for value, wanted in zip(one["weights"], other["weights"], strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-3, atol=1e-5)
    (said,) = found[0]["said"]
    assert "gamma` is another on rank 2" in said and "transient" in said, said
    assert "up to step 6" in said


@on_ranks(("horovod", 4))
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data", "mixed", "shards"])
def test_a_rank_that_is_wrong_again_ends_the_job(pool, mesh):
    axes = MESHES[mesh]
    fault = {"rank": 2, "variable": "gamma", "step": 5, "what": "gradient", "times": 9}
    found = pool.run(silent_programs.spoilt, axes, fault, every_steps=3, timeout=200)
    for rank, each in enumerate(found):
        assert each["is_transient"] is False and "persistent" in each["error"]
        assert 2 in each["ranks"]
        assert each["code"] == (78 if rank in each["ranks"] else 75)
