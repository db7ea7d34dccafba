"""KerasHub's families on two ranks, by SGD and by Adam, on batches that divide and do not."""

from __future__ import annotations

import functools

import pytest

from tests.conftest import full_cross, pool_ids
from tests.parity.comparing import check
from tests.parity.families import FAMILIES, train_family
from tests.parity.feeding import Feed

EVEN, UNEVEN = Feed("numpy", 12, 4), Feed("numpy", 15, 5)
#: Biases of XLNet's attention have gradients of hardly more than rounding, of which Adam makes steps of
#: full size.
BY_SGD = ["XLNet"]
QUICK = [("Bert", "sgd", UNEVEN)]


def cases():
    for kind in (("horovod", 2), ("tensorflow", 2)):
        for name in FAMILIES:
            for optimizer in ("sgd",) if name in BY_SGD else ("sgd", "adam"):
                for feed in (EVEN, UNEVEN):
                    marks = [full_cross]
                    if kind[0] == "horovod" and (name, optimizer, feed) in QUICK:
                        marks = []
                    elif (kind[0], feed) == ("horovod", UNEVEN) and (
                        optimizer == ("sgd" if name in BY_SGD else "adam")
                    ):
                        marks = [pytest.mark.slow]
                    case = f"{pool_ids(kind)}-{name}-{optimizer}-{feed}"
                    yield pytest.param(kind, name, optimizer, feed, marks=marks, id=case)


@functools.cache
def program(name: str, optimizer: str):
    return functools.partial(train_family, name=name, optimizer=optimizer)


@pytest.mark.parametrize(("pool", "name", "optimizer", "feed"), list(cases()), indirect=["pool"])
def test_as_one_process(pool, one_process, name, optimizer, feed):
    pytest.importorskip("keras_hub")
    check(pool, one_process, program(name, optimizer), feed)
