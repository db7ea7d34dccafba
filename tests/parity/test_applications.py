"""`keras.applications` on ranks: a batch that does not divide, against one process."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest

from tests.conftest import full_cross, pool_ids
from tests.parity.applications import APPLICATIONS, train_application
from tests.parity.comparing import allowed
from tests.parity.feeding import ORDERS, Feed
from tests.strategies import programs

GIVEN, *OTHERS = [Feed("numpy", 5, 5, order) for order in ORDERS]
#: The first loss is one forward pass. Deep nets of normalizations carry a rounding far: where another
#: order of the rows alone changes that loss more, ranks may differ by three times as much. After two
#: steps weights may differ by ten times what another order changes.
FIRST_LOSS, WEIGHTS, LOSS_TIMES, WEIGHT_TIMES = 2e-6, 1e-6, 3, 10

#: Members of another size of a family that is in the table.
_MODULES = {"imagenet_utils", "resnet50"}


def first_loss_apart(one, other) -> float:
    """The relative difference of the losses of the first step."""
    one, other = one.history["loss"][0], other.history["loss"][0]
    return abs(one - other) / abs(other)


def weights_apart(one, other) -> float:
    """The largest difference of a variable, in units of its own largest value."""
    return max(
        float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-3))
        for a, b in zip(one.weights.values(), other.weights.values(), strict=True)
    )


def check(pool, one_process, name: str) -> None:
    program = functools.partial(train_application, name=name)

    @functools.cache
    def alone(feed: Feed):
        return one_process.run(programs.in_one_process, program, feed, timeout=400)[0]

    expected = alone(GIVEN)

    def others():
        return map(alone, OTHERS)

    for result in pool.run(programs.on_rank, program, GIVEN, timeout=400):
        keeps_to(first_loss_apart, FIRST_LOSS, LOSS_TIMES, result, expected, others)
        keeps_to(weights_apart, WEIGHTS, WEIGHT_TIMES, result, expected, others)


def keeps_to(apart, first: float, times: int, result, expected, others) -> None:
    """Whether a result is as near to the expected one as another order of the rows could leave it."""
    found = apart(result, expected)
    changes = lambda: (apart(other, expected) for other in others())  # noqa: E731
    assert found <= allowed(found, first, changes, times=times)


@pytest.mark.parametrize(
    "pool",
    [("horovod", 2), pytest.param(("tensorflow", 2), marks=full_cross)],
    indirect=True,
    ids=pool_ids,
)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", list(APPLICATIONS))
def test_as_one_process(pool, one_process, name):
    check(pool, one_process, name)


def test_no_family_is_left_out():
    families = {name for name in dir(keras.applications) if name[0].islower()} - _MODULES
    found = {
        getattr(keras.applications, name).__module__.rpartition(".")[2] for name in APPLICATIONS
    }
    assert {name for name in families if not name.startswith("_")} == found - {"resnet50"}
