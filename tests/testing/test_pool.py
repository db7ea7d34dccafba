"""A pool of ranks whose run is broken off, or whose rank crashes."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

import pytest

from tfdist.runtime.exit_codes import ENDED_BY_WATCHDOG
from tfdist.testing import RankError, RankPool, engine


class BrokenOff(BaseException):
    """What interrupts a run from outside, as Ctrl-C does."""


def slow_answer() -> str:
    time.sleep(2)
    return "the first run's"


def crash() -> None:
    """Reads where there is no memory, with more threads than fit into a few lines."""
    ended = threading.Event()
    for _ in range(40):
        threading.Thread(target=ended.wait, daemon=True).start()
    ctypes.string_at(0)


def test_a_crash_shows_the_thread_that_crashed():
    with RankPool(1, "local") as pool, pytest.raises(RankError) as caught:
        pool.run(crash, timeout=60.0)
    assert "killed by SIGSEGV" in str(caught.value)
    first, where, *_ = caught.value.output.splitlines()
    assert first.startswith("Current thread")
    assert "in string_at" in where


def end_as_the_watchdog_does():
    if engine().rank == 0:
        os._exit(ENDED_BY_WATCHDOG)
    raise ValueError("the cause")


def test_the_rank_that_the_watchdog_ended_is_not_the_cause():
    with RankPool(2, "tensorflow") as pool, pytest.raises(ValueError, match="the cause"):
        pool.run(end_as_the_watchdog_does)


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
