"""A rank that has come apart from the others is named, with the variable."""

from __future__ import annotations

import pytest

from tests.conftest import on_ranks
from tests.monitoring import model_sync_programs

DATA = {"data": 4}
MIXED = {"data": 2, "tensor": 2}


@on_ranks(("horovod", 4))
@pytest.mark.parametrize(
    ("mesh", "spoilt", "said"),
    [
        (DATA, {}, None),
        (DATA, {2: "norm/gamma"}, "norm/gamma` is another on rank 2."),
        (DATA, {0: "norm/gamma", 3: "norm/gamma"}, "norm/gamma` differs between ranks 0, 1, 2, 3."),
        ({**DATA, "zero_stage": 3}, {}, None),
        (MIXED, {}, None),
        # A slice, which only the other rank of the data axis holds, too.
        (MIXED, {1: "fused/kernel"}, "differs between ranks 1, 3."),
    ],
)
def test_what_differs_is_named(pool, mesh, spoilt, said):
    for found in pool.run(model_sync_programs.differences, mesh, spoilt, timeout=120):
        assert found.endswith(said) if said else not found, found
