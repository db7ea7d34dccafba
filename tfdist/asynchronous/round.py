"""Where a worker stands among the updates that the first gradients make: with them, late, or waiting."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Round"]


class Round:
    """The steps of one worker in one `fit`, by the servers' counts of updates.

    Attributes:
        known: Each server's count of updates, as far as this worker knows.
        step: How many of its batches are done with: computed, or left out.
        skipped: How many were left out.
        was_late: Whether the last gradient was too late for some server.
    """

    def __init__(self):
        self.known: list[int] = []
        self.step = self.skipped = 0
        self.was_late = False
        self._sent_for: list[int] = []

    def note_push(self, then: Sequence[int], before: Sequence[int]) -> None:
        """A gradient was sent.

        Args:
            then: Each server's count when the parameters were read.
            before: Its count when the gradient came. One that was late need not wait.
        """
        self._sent_for, self.known = list(then), list(before)
        self.was_late = self._sent_for != self.known
        self.step += 1

    def is_over(self, versions: Sequence[int]) -> bool:
        """Whether the update is made that the last gradient was for, on all servers."""
        self.known = list(versions)
        return all(now > sent for now, sent in zip(versions, self._sent_for, strict=False))

    def skip(self, steps: int) -> bool:
        """Leaves out the next batches, where updates were made without them; whether it did."""
        if not self.known or min(self.known) - self.step < steps:
            return False
        self.step += steps
        self.skipped += steps
        return True
