"""The watchdog leaves the process' hooks to the program."""

from __future__ import annotations

import sys
import threading

from tests.conftest import on_ranks


def hooks_stay() -> bool:
    """Whether a watchdog that came and went has left all hooks as they were."""
    from tfdist import strategies
    from tfdist.monitoring.watchdog import Watchdog

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
