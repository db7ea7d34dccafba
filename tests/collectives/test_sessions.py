"""Collectives in a `tf.Graph` that a session runs, as programs for TensorFlow 1 do."""

from __future__ import annotations

import threading

import numpy as np

from tests.conftest import on_ranks


def sums_in_sessions() -> tuple:
    import tensorflow as tf

    from tfdist.collectives import all_reduce
    from tfdist.testing import engine

    world = engine().group()
    recorder = engine().recorder
    before = recorder.progress()
    found = []
    for _ in range(2):
        with tf.Graph().as_default():
            given = tf.compat.v1.placeholder(tf.float32, [3])
            total = all_reduce(given * (world.rank + 1.0), world, name="in a session")
            total = all_reduce(total, world, name="in a session, again")
            with tf.compat.v1.Session() as session:
                found.append(session.run(total, {given: [1.0, 2.0, 3.0]}))
    counted = recorder.progress() - before
    # The same operations as before, now called eagerly and in a function.
    one = tf.constant([1.0])
    found.append(all_reduce(one, world, name="in a session").numpy())
    function = tf.function(lambda value: all_reduce(value, world, name="in a session"))
    found.append(function(one).numpy())
    return found, counted, *seen_by_another_thread(recorder)


def counts_of_a_graph_that_is_not_run() -> tuple:
    import tensorflow as tf

    from tfdist.collectives import all_reduce
    from tfdist.testing import engine

    world = engine().group()
    with tf.Graph().as_default():
        all_reduce(tf.zeros([3]), world, name="not run")
    return seen_by_another_thread(engine().recorder)


def seen_by_another_thread(recorder) -> tuple:
    """What a watchdog sees: operations under way, or the exception that ends its thread."""
    seen: list = []

    def look():
        try:
            seen.append((recorder.in_flight(), recorder.progress() >= 0))
        except Exception as error:
            seen.append((repr(error), False))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(30.0)
    return seen[0]


@on_ranks(("horovod", 2))
def test_collectives_of_a_session_are_run_and_counted(pool):
    for found, counted, in_flight, is_counted in pool.run(sums_in_sessions, timeout=120):
        for total in found[:2]:
            np.testing.assert_array_equal(total, [6.0, 12.0, 18.0])
        assert [float(total[0]) for total in found[2:]] == [2.0, 2.0]
        assert counted == 4
        assert (in_flight, is_counted) == ([], True)


def refusal_and_a_sum() -> tuple[str, float]:
    import tensorflow as tf

    from tfdist.collectives import all_reduce
    from tfdist.testing import engine

    world = engine().group()
    try:
        with tf.Graph().as_default():
            all_reduce(tf.zeros([3]), world, name="refused")
    except NotImplementedError as error:
        return str(error), float(all_reduce(tf.constant(1.0), world, name="refused"))
    return "", 0.0


@on_ranks(("tensorflow", 2))
def test_tensorflows_collectives_refuse_a_session(pool):
    for message, total in pool.run(refusal_and_a_sum, timeout=120):
        assert "tf.compat.v1.Session" in message and "HorovodStrategy" in message
        assert total == 2.0


@on_ranks(("horovod", 2))
def test_the_watchdog_can_read_counts_beside_such_a_graph(pool):
    answers = pool.run(counts_of_a_graph_that_is_not_run, timeout=120)
    assert answers == [([], True)] * 2
