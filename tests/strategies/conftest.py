"""What several files of tests look at, made once."""

from __future__ import annotations

import functools

import pytest

from tests.strategies import observing, programs


@pytest.fixture(scope="session")
def observed(tmp_path_factory):
    """What each rank of a pool saw of the fit with all callbacks, and its directory."""

    @functools.cache
    def fit(pool):
        root = tmp_path_factory.mktemp("observed")
        run = programs.in_one_process if pool.engine == "local" else programs.on_rank
        results = pool.run(run, observing.fit_with_all_callbacks, root, timeout=200)
        return results, [root / f"rank{rank}" for rank in range(pool.num_ranks)]

    return fit


@pytest.fixture(scope="session")
def without_tfdist():
    """Runs functions in a process in which tfdist cannot be imported."""
    with observing.without_tfdist() as executor:
        yield lambda function, *args: executor.submit(function, *args).result(120)
