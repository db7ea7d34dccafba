"""Rows by speed, without ranks."""

from __future__ import annotations

import math

import numpy as np

from tfdist.addons.unequal_ranks.proportions import balanced_rows


def test_rows_follow_speed_within_limits():
    endless = [math.inf] * 3
    np.testing.assert_allclose(balanced_rows(12, [3, 2, 1], endless), [6, 4, 2])
    np.testing.assert_allclose(
        balanced_rows(12, [3, 2, 1], [4, math.inf, math.inf]), [4, 16 / 3, 8 / 3]
    )
    np.testing.assert_allclose(balanced_rows(12, [3, 2, 1], [4, 5, math.inf]), [4, 5, 3])
    np.testing.assert_allclose(balanced_rows(12, [3, 2, 1], [2, 2, 4]), [3, 3, 6])
    # A rank that stood still is asked for a little, and measured again.
    assert balanced_rows(100, [1.0, 1e-9], [math.inf] * 2)[1] > 1
