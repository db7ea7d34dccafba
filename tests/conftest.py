"""Ranks shared by tests: a pool of each kind is started once, and one at a time stays alive."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Sequence

import pytest

from tests import crossing, durations
from tfdist.testing import RankPool
from tfdist.utils.lazy import find_addon

_pools: dict[tuple[str, int], RankPool] = {}


def pool_ids(kind: tuple[str, int]) -> str:
    return f"{kind[0]}-{kind[1]}"


#: For a case that only `--cross=full` runs.
full_cross = pytest.mark.slow(full=True)


def every_case(function):
    """Has all slow cases of a test run, though they are many."""
    function.runs_every_case = True
    return function


def pytest_addoption(parser):
    parser.addoption(
        "--cross",
        choices=(*crossing.PARTS, "each", "full"),
        default="1",
        help="Which slow cases with parameters are run: in each file each test and each value of each "
        f"parameter at least once, of parameters with over {crossing.LONG} values, and of cases that take over "
        f"{crossing.LONG_SECONDS:.0f} s or were never timed, one of eight parts (1 to 8) or each; or all "
        "combinations (full). Cases that `::` or -k name are not divided [1]",
    )
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="Write what cases take to tests/durations.json; long ones are slow from then on",
    )


def pytest_configure(config):
    if config.getoption("record_durations"):
        config.pluginmanager.register(durations.Recorder())


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


def needs_addon(name: str):
    """Skips a test where the add-on `tfdist.addons.<name>` was left out."""
    return pytest.mark.skipif(find_addon(name) is None, reason=f"no tfdist.addons.{name}")


@pytest.fixture
def pool(request) -> RankPool:
    engine, num_ranks = request.param
    skip_without(engine)
    return _pool(engine, num_ranks)


@pytest.fixture(scope="module")
def no_old_garbage():
    """For tests with a limit on seconds: to collect what other tests left takes some of them."""
    gc.freeze()
    yield
    gc.unfreeze()


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of many slow cases of a test some are run; tests on the same ranks run one after the other."""
    seconds = durations.recorded()
    durations.mark_long(items, seconds)
    cross = config.getoption("cross")
    is_named = config.getoption("keyword") or any("::" in name for name in config.args)
    if cross in crossing.PARTS and is_named:
        cross = "each"  # What the user names is run.
    if cross != "full":
        left_out = crossing.left_out(items, cross, seconds)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]

    def kind(item):
        params = getattr(item, "callspec", None)
        found = params.params.get("pool") if params is not None else None
        return (found is not None, found or ("", 0))

    items.sort(key=kind)


def pytest_sessionfinish():
    while _pools:
        _pools.popitem()[1].close()
