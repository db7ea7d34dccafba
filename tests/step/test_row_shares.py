"""How rows are divided, without ranks."""

from __future__ import annotations

import itertools

import pytest

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


def test_shares_of_another_number_of_ranks_are_refused():
    with pytest.raises(ValueError, match=r"2 rank\(s\)"):
        RowShares([1, 2, 3], 2)
