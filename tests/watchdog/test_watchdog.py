"""The watchdog leaves the process' hooks to the program."""

from __future__ import annotations

import sys
import threading
import time

from tests.conftest import on_ranks


def hooks_stay() -> bool:
    """Whether a watchdog that came and went has left all hooks as they were."""
    from tfdist import strategies
    from tfdist.watchdog.watchdog import Watchdog

    def hooks():
        return sys.excepthook, threading.excepthook, sys.unraisablehook

    engine = strategies.MultiWorkerStrategy().engine
    before = hooks()
    watchdog = Watchdog(engine, 60.0)
    between = hooks()
    watchdog.close()
    return before == between == hooks()


@on_ranks(("tensorflow", 2))
def test_no_hook_is_replaced(pool):
    assert pool.run(hooks_stay) == [True, True]


def goes_on_after_a_failed_graph(timeout: float) -> tuple[list, list, list]:
    """The collectives under way after a graph failed in one, later, and after it has run well."""
    import tensorflow as tf

    from tfdist import collectives, strategies
    from tfdist.watchdog import watchdog

    engine = strategies.MultiWorkerStrategy().engine
    watchdog._ABANDONED_SECONDS = 1.0
    watched = watchdog.Watchdog(engine, timeout)

    @tf.function
    def step(x):
        return collectives.all_reduce(x, engine.group(), "sum", name="sums")

    def fail(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 0.0)]):
            return tf.identity(x)

    @tf.function
    def fails_inside(x):
        # It begins, and never ends.
        flight = engine.recorder.flight("fails", engine.group())
        with flight.begin(x) as x:
            result = fail(x)
        return flight.end(result)

    try:
        step(tf.ones(3))
        try:
            fails_inside(tf.ones(3))
        except tf.errors.InvalidArgumentError:
            after = [call.name for call in engine.recorder.in_flight()]
        time.sleep(2 * timeout)  # Without an end, the watchdog would end this rank now.
        later = [call.name for call in engine.recorder.in_flight()]
        step(tf.ones(3))
        return after, later, [call.name for call in engine.recorder.in_flight()]
    finally:
        watched.close()


@on_ranks(("tensorflow", 2))
def test_a_program_may_go_on_after_a_failed_graph(pool):
    for found in pool.run(goes_on_after_a_failed_graph, 5.0, timeout=100):
        assert found == (["fails"], [], [])
