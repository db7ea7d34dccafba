"""A pool of ranks whose run is broken off."""

from __future__ import annotations

import signal
import time

import pytest

from tfdist.testing import RankPool


class BrokenOff(BaseException):
    """What interrupts a run from outside, as Ctrl-C does."""


def slow_answer() -> str:
    time.sleep(2)
    return "the first run's"


@pytest.mark.slow
@pytest.mark.timeout(120, method="thread")  # The alarm is the test's own.
def test_a_run_does_not_get_the_answers_of_one_that_was_broken_off():
    def interrupt(*_):
        raise BrokenOff

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with RankPool(1, "local") as pool:
            assert pool.run(len, "ab") == [2]
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(BrokenOff):
                pool.run(slow_answer)
            assert pool.run(len, "abc") == [3]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
