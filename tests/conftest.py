"""Ranks shared by tests: a pool of each kind is started once, and one at a time stays alive."""

from __future__ import annotations

import collections
import gc
import importlib.util
from collections.abc import Sequence

import pytest

from tests import covering, durations
from tfdist.testing import RankPool
from tfdist.utils.lazy import find_addon

_pools: dict[tuple[str, int], RankPool] = {}


def pool_ids(kind: tuple[str, int]) -> str:
    return f"{kind[0]}-{kind[1]}"


#: A test with no more slow cases than these runs all of them in `make test-all`.
SMALL_MATRIX = 4
#: Of a parameter with more values than this, as families of models and scripts are, a run takes one in
#: `TURNS`, and the next function of the file begins with another one.
LONG = 8
TURNS = 3


def pytest_addoption(parser):
    parser.addoption(
        "--strength",
        type=int,
        choices=(1, 2),
        default=1,
        help="Of the slow cases of a matrix: each value of each parameter, or each pair of values [1]",
    )
    parser.addoption(
        "--turn",
        type=int,
        choices=range(TURNS),
        default=0,
        help=f"Of a parameter with over {LONG} values, one in {TURNS}, from the value of this number [0]",
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
    """Long matrices are thinned out; tests on the same ranks run one after the other."""
    functions = collections.defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("matrix") is None:
            functions[str(item.path), item.originalname].append(item)
    seen: collections.Counter[str] = collections.Counter()
    for (path, _), cases in functions.items():
        if config.getoption("strength") == 1:
            cases = _in_turn(cases, config.getoption("turn") + seen[path])
        seen[path] += 1
        _thin_out(cases, config.getoption("strength"))
    durations.mark_long(items)

    def kind(item):
        params = getattr(item, "callspec", None)
        found = params.params.get("pool") if params is not None else None
        return (found is not None, found or ("", 0))

    items.sort(key=kind)


def _in_turn(cases, turn: int) -> list:
    """The cases whose turn it is, and the quick ones; the others become cases of the matrix alone."""
    if cases[0].get_closest_marker("each"):
        return cases
    order = [_values(case) for case in cases]
    taken = []
    for case, values in zip(cases, order, strict=True):
        for name, value in values.items():
            every = list(dict.fromkeys(other[name] for other in order))
            if len(every) > LONG and (every.index(value) - turn) % TURNS:
                break
        else:
            taken.append(case)
            continue
        if case.get_closest_marker("slow") is None:
            taken.append(case)
        else:
            case.add_marker(pytest.mark.matrix)
    return taken


def _thin_out(cases, strength: int) -> None:
    """Of the slow cases of one test, those that add little become cases of the matrix alone."""
    slow = [case for case in cases if case.get_closest_marker("slow") is not None]
    quick = [_values(case) for case in cases if case not in slow]
    if len(slow) <= SMALL_MATRIX:
        return
    chosen = covering.choose([_values(case) for case in slow], quick, strength)
    for number, case in enumerate(slow):
        if number not in chosen:
            case.add_marker(pytest.mark.matrix)


def _values(case) -> dict[str, str]:
    return {name: repr(value) for name, value in case.callspec.params.items()}


def pytest_sessionfinish():
    while _pools:
        _pools.popitem()[1].close()
