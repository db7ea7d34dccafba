"""A bit that one rank gets wrong is found within some steps, named, and mended where it can be."""

from __future__ import annotations

import numpy as np
import pytest

from tests.addons.monitoring import silent_programs
from tests.conftest import full_cross, on_ranks

MESHES = {
    "data": {"data": 4},
    # Slices have a second copy along the data axis, whole variables along both.
    "mixed": {"data": 2, "tensor": 2},
    # Those of a stage.
    "pipeline": {"data": 2, "pipeline": 2},
    # A shard of a whole variable has a second copy along the tensor axis.
    "shards": {"data": 2, "tensor": 2, "zero_stage": 3},
}
FAULTS = {
    "weights": {"step": 4, "what": "weights"},
    "gradient": {"step": 5, "what": "gradient"},
}


def check_transient(pool, mesh: dict, fault: dict) -> str:
    """Checks that a training went on as if nothing had happened; returns what was said."""
    fault = {"variable": "gamma", **fault}
    found = pool.run(silent_programs.spoilt, mesh, fault, every_steps=3, timeout=200)
    right = pool.run(silent_programs.spoilt, mesh, None, every_steps=3, timeout=200)
    for one, other in zip(found, right, strict=True):
        assert one["error"] is None and not other["said"], (one, other)
        np.testing.assert_allclose(one["losses"], other["losses"], rtol=1e-5)
        for value, wanted in zip(one["weights"], other["weights"], strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-3, atol=1e-5)
    assert not any(each["said"] for each in found[1:])
    (said,) = found[0]["said"]
    assert "The fault was transient: the 3 steps up to step 6 were run again" in said
    return said


@on_ranks(("tensorflow", 2))
def test_of_two_ranks_the_second_run_tells_which_was_wrong(pool):
    said = check_transient(pool, {"data": 2}, {"rank": 1, **FAULTS["gradient"]})
    assert "gamma` has a different value on rank 1" in said, said


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("mesh", list(MESHES))
@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_flipped_bit_is_transient(pool, mesh, fault):
    said = check_transient(pool, MESHES[mesh], {"rank": 2, **FAULTS[fault]})
    if fault == "gradient" or mesh == "data":
        assert "gamma` has a different value on rank 2" in said, said
    else:
        # The ranks of a layer compute with each other's parts: the step spreads what is wrong.
        assert "differs between" in said or "has a different value on" in said


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("mesh", ["data", "mixed", "shards"])
def test_a_rank_that_is_wrong_again_ends_the_job(pool, mesh):
    fault = {"rank": 2, "variable": "gamma", "step": 5, "what": "gradient", "times": 9}
    found = pool.run(silent_programs.spoilt, MESHES[mesh], fault, every_steps=3, timeout=200)
    for rank, each in enumerate(found):
        assert each["is_transient"] is False and "persistent" in each["error"]
        assert 2 in each["ranks"]
        assert each["code"] == (78 if rank in each["ranks"] else 75)


def check_quiet(pool, steps: int) -> None:
    for losses, said in pool.run(silent_programs.even, steps, timeout=3600):
        assert not said
        assert losses[-1] < losses[0]


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_no_false_alarm(pool):
    check_quiet(pool, 200)


@full_cross
@pytest.mark.timeout(3600)
@on_ranks(("horovod", 2))
def test_no_false_alarm_for_long(pool):
    check_quiet(pool, 10_000)
