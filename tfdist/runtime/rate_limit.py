"""How many strangers a listener deals with: a token bucket."""

from __future__ import annotations

import time


class RateLimit:
    """Says when too many callers were refused in too short a time.

    Callers of the job itself use up nothing, however many come at once. After `burst` refused ones
    no more than `per_second` are dealt with, so that strangers cannot take the process's time.

    Args:
        burst: How many may be refused at any rate.
        per_second: How many a second from then on.
    """

    def __init__(self, burst: float = 500.0, per_second: float = 100.0):
        self._burst, self._per_second = burst, per_second
        self._left, self._counted = burst, time.monotonic()

    def refused(self) -> None:
        """Counts a caller that was refused."""
        self._left = max(self._refilled() - 1.0, 0.0)

    def is_exceeded(self) -> bool:
        """Whether callers are to wait."""
        return self._refilled() < 1.0

    def _refilled(self) -> float:
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._counted) * self._per_second)
        self._counted = now
        return self._left
