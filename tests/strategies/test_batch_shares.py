"""Ranks that get unequal parts of each batch: results stay those of one process."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import on_ranks
from tests.strategies import programs


def with_shares(strategy, shares):
    """Another strategy over the same engine; None stays plain Keras."""
    if strategy is None:
        return None
    return type(strategy)(engine=strategy.engine, batch_shares=shares)


def fixed(strategy, build, rows):
    shared = None
    if strategy is not None:
        shares = [3, 1, 2][: strategy.row_group.size]
        shared = with_shares(strategy, shares)
        np.testing.assert_allclose(shared.batch_shares, np.array(shares) / sum(shares), atol=1e-6)
    return programs.train_images(shared, build, "sgd", rows)


@on_ranks(("tensorflow", 2), slow=[("horovod", 3)])
@pytest.mark.parametrize("build", ["mlp", "convnet"])
def test_fixed_shares_train_as_one_process(pool, one_process, build):
    expected = one_process.run(programs.in_one_process, fixed, build, programs.UNEVEN_ROWS)[0]
    results = pool.run(programs.on_rank, fixed, build, programs.UNEVEN_ROWS)
    programs.assert_same(results, expected)
