"""Ranks exchange parts before they write: a chunk has one writer, and nothing is lost."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.checkpoint.regrouping_programs import written
from tests.conftest import on_ranks, slow_but

MESHES = {
    "zero-1": ({"zero_stage": 1}, False),
    "zero-3": ({"zero_stage": 3}, False),
    "zero-tensor": ({"data": 2, "tensor": 2, "zero_stage": 2}, False),
    "zero-context": ({"data": 2, "context": 2, "zero_stage": 1}, False),
    "zero-experts": ({"data": 2, "expert": 2, "zero_stage": 3}, True),
    "experts-tensor": ({"data": 1, "expert": 2, "tensor": 2, "zero_stage": 1}, True),
    "zero-pipeline": ({"data": 2, "pipeline": 2, "zero_stage": 1}, False),
    # The first stage has one embedding, and the last has a norm and the head.
    "unequal-stages": ({"data": 2, "pipeline": 2, "zero_stage": 1}, False),
}


def check(results, most_writers: int) -> None:
    whole = {name: value for result in results for name, value in result["whole"].items()}
    arrays = {name: np.full(value.shape, np.nan) for name, value in whole.items()}
    chunks: Counter = Counter()
    rows: Counter = Counter()
    for result in results:
        for name, (shape, parts, touched) in result["written"].items():
            chunks.update((name, chunk) for chunk in touched)
            for box, value in parts:
                if name in arrays:
                    assert np.isnan(arrays[name][box]).all(), f"{name} is written twice"
                    arrays[name][box] = value
                else:
                    rows[name, shape] += value.size
    for name, value in whole.items():
        np.testing.assert_array_equal(arrays[name], value, err_msg=name)
    for name, shape in set().union(*(result["rows"] for result in results)):
        assert rows[name, shape] == np.prod(shape), name
    assert max(chunks.values()) <= most_writers


@on_ranks(("horovod", 4), slow=[("tensorflow", 4)])
@pytest.mark.parametrize("mesh", slow_but(["zero-3", "unequal-stages"], list(MESHES)))
@pytest.mark.parametrize("chunk_bytes", [5000, pytest.param(200, marks=pytest.mark.slow)])
def test_each_chunk_has_one_writer(pool, mesh, chunk_bytes):
    """Of slices as many ranks as have slices of a chunk, and two at edges: of slices, and of wide rows."""
    options, experts = MESHES[mesh]
    positions = "rotary" if mesh == "unequal-stages" else "learned"
    results = pool.run(written, options, chunk_bytes, experts, positions, timeout=200)
    split = options.get("tensor", 1) * options.get("expert", 1)
    check(results, 1 if split == 1 and chunk_bytes == 5000 else 2 * split)
    shares = [
        sum(value.size for _, parts, _ in result["written"].values() for _, value in parts)
        for result in results
    ]
    if "pipeline" not in options and chunk_bytes == 200:
        assert max(shares) < 1.5 * sum(shares) / len(shares)
