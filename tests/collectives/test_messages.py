"""Messages between two ranks, of which each may or may not know the size when it makes its graph."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import on_ranks, slow_but
from tfdist.collectives.run import receive_tensor, send_tensor
from tfdist.testing import engine


def passed(rows: int, static: tuple[bool, bool], used: bool) -> np.ndarray:
    """What the second rank receives in two steps; the first one uses what it has sent only if asked to."""
    group = engine().group()

    @tf.function
    def step(known, value):
        size = rows if static[group.rank] else known
        if group.rank:
            return receive_tensor([size, 3], tf.float32, group, 0, name="rows")
        sent = send_tensor(tf.fill([size, 3], value), group, 1, name="rows")
        return sent + 0.0 if used else value

    return np.stack([step(tf.constant(rows), tf.constant(value)) for value in (1.0, 2.0)])


CASES = [(rows, sender, receiver) for rows in (0, 2) for sender in (1, 0) for receiver in (1, 0)]


@on_ranks(("horovod", 2), ("tensorflow", 2))
@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
@pytest.mark.parametrize(("rows", "sender", "receiver"), slow_but([(0, 1, 0), (2, 1, 0)], CASES))
def test_sizes_that_one_rank_knows_before_the_step(pool, rows, sender, receiver, used):
    _, received = pool.run(passed, rows, (sender, receiver), used, timeout=60)
    np.testing.assert_array_equal(received, np.full([2, rows, 3], [[[1.0]], [[2.0]]]))
