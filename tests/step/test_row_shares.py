"""How rows are divided, without ranks."""

from __future__ import annotations

import itertools

import pytest
import tensorflow as tf

from tfdist.data.sharding import shard_batches
from tfdist.step.row_shares import RowShares
from tfdist.step.shares import PARTS


@pytest.mark.parametrize("shares", [[1], [3, 1], [1, 1, 1], [0.1, 0.7, 0.2], [1e-3, 1, 1, 9.9]])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 256, 100_003, 2**31])
def test_every_row_belongs_to_one_rank(shares, rows):
    found = RowShares(shares, len(shares))
    ranges = [tuple(map(int, found.row_range(rows, rank))) for rank in range(len(shares))]
    assert ranges[0][0] == 0 and ranges[-1][1] == rows
    assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))
    for (start, end), share in zip(ranges, shares, strict=True):
        assert abs(end - start - rows * share / sum(shares)) < 1 + rows / PARTS


def test_shares_that_are_none_are_refused():
    shares = RowShares([1, 1], 2)
    for parts in ([PARTS], [PARTS, 1], [PARTS + 1, -1]):
        with pytest.raises(ValueError, match="2 integers that add up"):
            shares.set_parts(parts)
    with pytest.raises(ValueError, match=r"2 rank\(s\)"):
        RowShares([1, 2, 3], 2)


def test_a_change_holds_for_the_next_batch():
    """Nothing is read ahead with old shares."""
    shares = RowShares([1, 1], 2)
    data = tf.data.Dataset.range(100).batch(10)
    ranks = [iter(shard_batches(data, 2, rank, shares)) for rank in range(2)]
    for parts in ([1, 1], [9, 1], [1, 4], [1, 0], [2, 3]):
        total = sum(parts)
        shares.set_parts(
            [PARTS * part // total for part in parts[:1]] + [PARTS - PARTS * parts[0] // total]
        )
        own = [next(rank).numpy().tolist() for rank in ranks]
        assert [len(rows) for rows in own] == [10 * part // total for part in parts]
        joined = own[0] + own[1]
        assert joined == list(range(joined[0], joined[0] + 10))
