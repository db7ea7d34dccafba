"""A strategy of another package, which `auto` returns where it is wanted."""

from __future__ import annotations

import tensorflow as tf

import tfdist
from tests.conftest import on_ranks
from tfdist.extend import register_strategy


def chosen(wanted: bool):
    made = []

    def make(mesh, **options):
        made.append((mesh, options))
        return tf.distribute.get_strategy()

    register_strategy("Other", lambda: wanted, make)
    strategy = tfdist.strategies.auto(zero_stage=1)
    return type(strategy).__name__, made


def test_auto_asks_it_first(one_process):
    name, made = one_process.run(chosen, True)[0]
    assert name == "_DefaultDistributionStrategy" and made == [(None, {"zero_stage": 1})]


@on_ranks(("tensorflow", 2))
def test_auto_goes_by_the_launcher_where_it_is_not_wanted(pool):
    for name, made in pool.run(chosen, False, timeout=60):
        assert name == "MultiWorkerStrategy" and made == []
