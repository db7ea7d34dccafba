"""A rank that is not in sync with the others is named, with the variable."""

from __future__ import annotations

import pytest

from tests.addons.monitoring import model_sync_programs
from tests.conftest import on_ranks, slow_but

CASES = {
    "data": (
        {"data": 4},
        [
            ({}, ""),
            ({2: "gamma"}, "gamma` has a different value on rank 2."),
            ({0: "gamma", 3: "gamma"}, "gamma` differs between ranks 0, 1, 2, 3."),
        ],
    ),
    # A slice, which only the other rank of the data axis holds, too.
    "mixed": ({"data": 2, "tensor": 2}, [({}, ""), ({1: "kernel"}, "differs between ranks 1, 3.")]),
    "shards": ({"data": 4, "zero_stage": 3}, [({}, "")]),
}


@on_ranks(("horovod", 4))
@pytest.mark.parametrize("case", slow_but(["mixed"], list(CASES)))
def test_what_differs_is_named(pool, case):
    mesh, cases = CASES[case]
    spoilt = [each for each, _ in cases]
    for found in pool.run(model_sync_programs.differences, mesh, spoilt, timeout=120):
        for text, (_, said) in zip(found, cases, strict=True):
            assert text.endswith(said) if said else not text, text
