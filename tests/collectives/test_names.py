"""A collective has one name on all ranks, wherever their graphs hold it."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.conftest import on_ranks


def summed_in_a_branch(inner: bool) -> list[float]:
    """Graphs that differ by rank: the collective's branch is the rank-th of the graph."""
    from tfdist.testing import rank

    engine = rank.engine()
    engine = getattr(engine, "inner", engine) if inner else engine
    flag = tf.Variable(True)

    @tf.function
    def other(x):
        return tf.cond(flag, lambda: x + 1.0, lambda: x)

    @tf.function
    def nested(x):
        return tf.cond(
            flag,
            lambda: engine.all_reduce(x, engine.group(), "sum", f"all_reduce/branch/{inner}"),
            lambda: x,
        )

    @tf.function
    def step(x):
        for _ in range(engine.rank):
            x = other(x)
        return nested(x)

    return step(tf.zeros(2)).numpy().tolist()


@pytest.mark.slow
@on_ranks(("horovod", 3), ("tensorflow", 3))
@pytest.mark.parametrize("inner", [True, False])
def test_graphs_that_differ(pool, inner):
    assert pool.run(summed_in_a_branch, inner, timeout=60) == [[3.0, 3.0]] * 3
