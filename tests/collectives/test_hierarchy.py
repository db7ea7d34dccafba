"""Sums over hosts: who talks to whom, and that they are the sums."""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest

from tests.conftest import skip_without
from tfdist.collectives.p2p.hierarchy import Hierarchy, hierarchy_of
from tfdist.testing import RankPool

TWO_BY_TWO = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("hosts", "rank", "expected"),
    [
        (TWO_BY_TWO, 0, Hierarchy((0, 1), (0, 2))),
        (TWO_BY_TWO, 3, Hierarchy((2, 3), (1, 3))),
        (["a", "b", "a", "b"], 3, Hierarchy((1, 3), (2, 3))),
        (["a"] * 4, 0, None),
        (["a", "b", "c", "d"], 0, None),
        (["a", "a", "a", "b"], 0, None),
    ],
)
def test_who_talks_to_whom(hosts, rank, expected):
    assert hierarchy_of(range(4), rank, hosts) == expected


def test_a_group_of_some_ranks():
    hosts = ["a", "a", "a", "a", "b", "b", "b", "b"]
    assert hierarchy_of((0, 2, 4, 6), 6, hosts) == Hierarchy((4, 6), (2, 6))
    assert hierarchy_of((0, 4), 0, hosts) is None


def sums(sizes: list[int]) -> list[tuple[np.ndarray, ...]]:
    """The sum and the maximum over ranks, half of which take another name for their host."""
    import tensorflow as tf

    from tfdist.collectives import all_reduce
    from tfdist.testing import engine

    rank = int(os.environ["HOROVOD_RANK"])
    socket.gethostname = lambda: TWO_BY_TWO[rank]
    group = engine().group()
    assert engine().hierarchy(group) is not None

    @tf.function
    def both(x):
        return [all_reduce(x, group, how, name=f"{how}-{x.shape[0]}") for how in ("mean", "max")]

    drawn = [np.random.default_rng(rank).normal(size=size).astype("float32") for size in sizes]
    return [tuple(part.numpy() for part in both(tf.constant(x))) for x in drawn]


@pytest.mark.slow
def test_sums_of_two_levels():
    skip_without("horovod")
    sizes = [1, 3, 50_001]
    with RankPool(4, "horovod") as pool:
        results = pool.run(sums, sizes, timeout=120)
    for place, size in enumerate(sizes):
        drawn = [
            np.random.default_rng(rank).normal(size=size).astype("float32") for rank in range(4)
        ]
        for found in results:
            mean, most = found[place]
            np.testing.assert_allclose(mean, np.mean(drawn, axis=0), atol=1e-6)
            np.testing.assert_array_equal(most, np.max(drawn, axis=0))
            np.testing.assert_array_equal(mean, results[0][place][0])
