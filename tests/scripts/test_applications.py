"""`keras.applications` on ranks: a batch that does not divide, against one process."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest

from tests.conftest import on_ranks, slow_but
from tests.scripts.applications import APPLICATIONS, train_application
from tests.scripts.comparing import differences
from tests.scripts.feeding import Feed
from tests.strategies import programs

FEED, BACKWARDS = Feed("numpy", 5, 5), Feed("numpy", 5, 5, backwards=True)
#: A loss is one forward pass; weights may differ by so many times what another order changes.
FIRST_LOSS, ORDERS = 2e-6, 10

#: Members of another size of a family that is in the table.
_MODULES = {"imagenet_utils", "resnet50"}


def check(pool, one_process, name: str) -> None:
    program = functools.partial(train_application, name=name)
    expected, other = (
        one_process.run(programs.in_one_process, program, feed, timeout=400)[0]
        for feed in (FEED, BACKWARDS)
    )
    allowed = ORDERS * differences(other, expected)
    for result in pool.run(programs.on_rank, program, FEED, timeout=400):
        first, right = result.history["loss"][0], expected.history["loss"][0]
        np.testing.assert_allclose(first, right, rtol=FIRST_LOSS)
        assert differences(result, expected) <= max(allowed, 1e-6)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize("name", slow_but(["MobileNetV2"], list(APPLICATIONS)))
def test_as_one_process(pool, one_process, name):
    check(pool, one_process, name)


def test_no_family_is_left_out():
    families = {name for name in dir(keras.applications) if name[0].islower()} - _MODULES
    found = {
        getattr(keras.applications, name).__module__.rpartition(".")[2] for name in APPLICATIONS
    }
    assert {name for name in families if not name.startswith("_")} == found - {"resnet50"}
