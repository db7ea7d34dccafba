"""KerasHub's families on two ranks, by SGD and by Adam, on batches that divide and do not."""

from __future__ import annotations

import functools

import pytest

from tests.conftest import on_ranks
from tests.scripts.comparing import check
from tests.scripts.families import FAMILIES, train_family
from tests.scripts.feeding import Feed

EVEN, UNEVEN = Feed("numpy", 12, 4), Feed("numpy", 15, 5)
QUICK = [("GPT2", "adam", UNEVEN), ("Bert", "sgd", UNEVEN)]

CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for name in FAMILIES
    for optimizer in ("sgd", "adam")
    for case in ((name, optimizer, EVEN), (name, optimizer, UNEVEN))
]


@functools.cache
def program(name: str, optimizer: str):
    return functools.partial(train_family, name=name, optimizer=optimizer)


@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
@pytest.mark.parametrize(("name", "optimizer", "feed"), CASES, ids=str)
def test_as_one_process(pool, one_process, name, optimizer, feed):
    pytest.importorskip("keras_hub")
    check(pool, one_process, program(name, optimizer), feed)
