"""How rows are divided by measured shares, without ranks."""

from __future__ import annotations

import pytest

from tfdist.addons.unequal_ranks.measured_rows import MeasuredRowShares
from tfdist.step.row_shares import RowShares
from tfdist.step.shares import MeasuredShares, parts_of


def test_limits_hold_for_each_batch():
    found = MeasuredRowShares(MeasuredShares(max_rows=[4, 10, 6]), 3)

    def sizes(rows):
        ranges = [found.row_range(rows, rank) for rank in range(3)]
        return [int(end - start) for start, end in ranges]

    assert sizes(6) == [2, 2, 2]
    assert sizes(18) == [4, 8, 6]
    assert sizes(20) == [4, 10, 6]
    assert sum(sizes(50)) == 50  # More than there is room for.
    found.set_parts(parts_of([20, 1, 1]))
    assert sizes(11) == [4, 6, 1]


def test_what_a_checkpoint_keeps_comes_back():
    shares = MeasuredRowShares(MeasuredShares(), 2)
    shares.set_parts(parts_of([5, 3]))
    shares.speeds = (50.0, 30.0)
    other = MeasuredRowShares(MeasuredShares(), 2)
    assert other.restore(shares.state())
    assert other.parts == shares.parts and other.speeds == shares.speeds
    assert [int(bound) for bound in other.row_range(16, 0)] == [0, 10]
    assert not MeasuredRowShares(MeasuredShares(), 3).restore(shares.state())
    assert not RowShares([1, 1], 2).restore(shares.state())


def test_limits_are_one_for_each_rank():
    with pytest.raises(ValueError, match="max_rows"):
        MeasuredRowShares(MeasuredShares(max_rows=[1, 2, 3]), 2)
