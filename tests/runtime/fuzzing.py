"""What the tests of handshakes, listeners and channels share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

__all__ = ["FUZZ", "KEY", "PURPOSE"]

KEY, PURPOSE = b"key of this job", "test"
FUZZ = settings(
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
