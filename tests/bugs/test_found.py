"""What readers found: each was another result than that of one process, or an error."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bugs import found_programs
from tests.conftest import on_ranks, slow_but

KINDS = [
    *("nested_predict", "other_logs", "decorated_step"),
    *("head_without_a_loss", "scale_of_empty_ranks", "state_in_float64"),
]


@on_ranks(("horovod", 2), slow=[("tensorflow", 2), ("horovod", 3)])
@pytest.mark.parametrize("kind", slow_but(KINDS[:3], KINDS))
def test_as_one_process(pool, one_process, kind):
    program = getattr(found_programs, kind)
    right = one_process.run(program, False)[0]
    for found in pool.run(program, True):
        np.testing.assert_allclose(found, right, rtol=1e-4 if kind == "nested_predict" else 1e-5)
        if kind == "state_in_float64":
            assert found == 1.7e9 + 3


@on_ranks(("horovod", 2))
def test_a_step_that_is_a_function_is_refused(pool):
    for said in pool.run(found_programs.traced_step):
        assert "`train_step` must not be a tf.function" in said
