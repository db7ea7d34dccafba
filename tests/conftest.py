"""Ranks shared by tests: a pool of each kind is started once, and one at a time stays alive."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest

from tfdist.testing import RankPool

_pools: dict[tuple[str, int], RankPool] = {}


def pool_ids(kind: tuple[str, int]) -> str:
    return f"{kind[0]}-{kind[1]}"


def on_ranks(*kinds: tuple[str, int], slow: Sequence[tuple[str, int]] = ()):
    """Runs a test on pools of each (engine, number of ranks), given to it as `pool`.

    On those of `slow` the test is one of the slow ones.
    """
    more = [pytest.param(kind, marks=pytest.mark.slow) for kind in slow]
    return pytest.mark.parametrize("pool", [*kinds, *more], indirect=True, ids=pool_ids)


def slow_but(quick: Sequence, values: Sequence) -> list:
    """Parameters for a test that is one of the slow ones with all values but some."""
    return [
        value
        if value in quick
        else pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow
        )
        for value in values
    ]


def skip_without(engine: str) -> None:
    """Skips a test whose engine is not there."""
    if engine == "horovod" and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: `tfdist-install-horovod` builds it.")


@pytest.fixture
def pool(request) -> RankPool:
    engine, num_ranks = request.param
    skip_without(engine)
    return _pool(engine, num_ranks)


@pytest.fixture
def one_process() -> RankPool:
    """The single process that all others are measured against."""
    return _pool("local", 1)


def _pool(engine: str, num_ranks: int) -> RankPool:
    kind = (engine, num_ranks)
    if kind not in _pools:
        # Idle ranks of Horovod keep the cores busy with looking for work, so only one kind lives.
        for other in [other for other in _pools if other[0] != "local"]:
            if engine != "local":
                _pools.pop(other).close()
        _pools[kind] = RankPool(num_ranks, engine)
    return _pools[kind]


def pytest_collection_modifyitems(items):
    """Tests on the same ranks run one after the other."""

    def kind(item):
        params = getattr(item, "callspec", None)
        found = params.params.get("pool") if params is not None else None
        return (found is not None, found or ("", 0))

    items.sort(key=kind)


def pytest_sessionfinish():
    while _pools:
        _pools.popitem()[1].close()
