"""Gradients that a `train_step` reads are those of the global batch.

The story: a step that clipped by hand took the norm of its own rank's gradient, and under ZeRO-3 of its
own shards, so that parts of one kernel were scaled by other numbers than the rest. Gradients that were
added up by hand over unequal batches were weighed by the shares of the last one.
"""

from __future__ import annotations

import functools

import pytest

from tests.bugs.comparing import check
from tests.bugs.gradient_programs import PROGRAMS
from tests.conftest import on_ranks, slow_but

QUICK = [("Clips", 0), ("Clips", 3), ("Accumulates", 0), ("Words", 3)]
CASES = [(name, stage) for name in PROGRAMS for stage in (0, 1, 2, 3)]
#: Half precision, and what divides by small norms.
TOLERANCES = {"ClipsMixedPrecision": 2e-3}


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("horovod", 3)])
@pytest.mark.parametrize(("name", "zero_stage"), slow_but(QUICK, CASES))
def test_as_one_process(pool, one_process, name, zero_stage):
    tolerance = TOLERANCES.get(name, 2e-5)
    check(pool, one_process, PROGRAMS[name], tolerance=tolerance, zero_stage=zero_stage)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("name", slow_but(["Clips"], PROGRAMS))
def test_eagerly(pool, one_process, name):
    program = functools.partial(PROGRAMS[name], run_eagerly=True, epochs=1)
    check(pool, one_process, program, tolerance=TOLERANCES.get(name, 2e-5), zero_stage=3)
