"""The rate at which strangers are dealt with."""

from __future__ import annotations

import pytest

from tfdist.runtime import rate_limit
from tfdist.runtime.rate_limit import RateLimit


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(rate_limit.time, "monotonic", lambda: now[0])
    return now


def test_a_burst_is_free_and_then_the_rate_holds(clock):
    limit = RateLimit(burst=10.0, per_second=2.0)
    for _ in range(10):
        assert not limit.is_exceeded()
        limit.refused()
    assert limit.is_exceeded()
    clock[0] += 0.5
    assert not limit.is_exceeded()
    limit.refused()
    assert limit.is_exceeded()
    clock[0] += 1000.0
    for _ in range(10):
        assert not limit.is_exceeded()
        limit.refused()
    assert limit.is_exceeded()
