"""What several files of tests start, ended with each test."""

from __future__ import annotations

import time

import pytest

from tests.launch.jobs import Jobs


@pytest.fixture
def jobs():
    """A way to start jobs; whatever they do, no process of theirs is left."""
    jobs = Jobs()
    try:
        yield jobs
        deadline = time.monotonic() + 5
        while jobs.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert jobs.left() == []
    finally:
        jobs.close()
