"""A token bucket that limits how many refused connections a listener handles."""

from __future__ import annotations

import time


class RateLimit:
    """Reports when too many callers were refused in too short a time.

    Callers of the job itself use no tokens, however many connect at once. After `burst` refused ones
    no more than `per_second` are handled, which limits the CPU time that unauthenticated connections
    cost.

    Args:
        burst: The size of the bucket.
        per_second: The number of tokens that are added per second.
    """

    def __init__(self, burst: float = 500.0, per_second: float = 100.0):
        self._burst, self._per_second = burst, per_second
        self._left, self._counted = burst, time.monotonic()

    def refused(self) -> None:
        """Counts a refused caller."""
        self._left = max(self._refilled() - 1.0, 0.0)

    def is_exceeded(self) -> bool:
        """Whether callers have to wait."""
        return self._refilled() < 1.0

    def _refilled(self) -> float:
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._counted) * self._per_second)
        self._counted = now
        return self._left
