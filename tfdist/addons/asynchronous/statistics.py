"""The staleness of a worker's updates."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Staleness:
    """Counts over some steps.

    The staleness of an update is the number of other updates that a server applied between this
    worker's read and its write; with several servers, the largest of these.

    Attributes:
        updates: The number of updates.
        total: The sum of their staleness.
        largest: The largest staleness.
    """

    updates: int = 0
    total: int = 0
    largest: int = 0

    @property
    def mean(self) -> float:
        """The mean staleness."""
        return self.total / max(self.updates, 1)

    def count(self, staleness: int) -> None:
        """Counts an update."""
        self.updates += 1
        self.total += staleness
        self.largest = max(self.largest, staleness)
