"""Detection of slow ranks: the work of ranks per step, compared with each other and with the past."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.addons.monitoring.monitor.block import Block
from tfdist.addons.monitoring.monitor.sections import SECTIONS

#: Shorter delays occur on any rank of a busy machine.
_LEAST_SECONDS = 0.002
#: An excess of so many limits is reported at once, a smaller one only if the next block confirms it.
_PLAIN = 3.0
#: The sections that are reported for a slow rank: in the others ranks wait for each other.
_NAMED = tuple(s for s in SECTIONS if s not in ("communication", "monitor", "checkpoint"))


@dataclasses.dataclass(frozen=True)
class SlowRank:
    """A rank that the others wait for.

    Attributes:
        rank: The rank.
        section: The section in which most of the excess is.
        excess: The seconds by which its work in a step exceeds the median of the others.
        step: The time of a step, in seconds.
    """

    rank: int
    section: str
    excess: float
    step: float

    def words(self, host: str, seen: str) -> str:
        """A message for the user.

        Args:
            host: The host of the rank.
            seen: A further observation, or "".
        """
        section = self.section.replace("_", " ")
        return (
            f"Rank {self.rank} on {host} is slow: in each step of {1e3 * self.step:.0f} ms it works "
            f"{1e3 * self.excess:.0f} ms longer than the other ranks, most of it in `{section}`{seen}."
        )


class SlowRanks:
    """Compares the ranks, block by block.

    Args:
        limit: The fraction of a step by which a rank's work may exceed the median of the others.
    """

    def __init__(self, limit: float):
        self._limit = limit
        self._suspects: dict[int, str] = {}
        self._named: set[tuple[int, str]] = set()
        self._best: dict[int, float] = {}
        #: By rank: `score`, `score_of_past` and `came_last`.
        self.scores: dict[int, dict[str, Any]] = {}

    def look(self, blocks: Sequence[Block], timers: Sequence[str]) -> list[SlowRank]:
        """Adds a block of each rank.

        Returns:
            The ranks to report: each once per section, until it is as fast as the others again.
        """
        if len(blocks) < 2 or any(not block["steps"] for block in blocks):
            return []
        work = [block["work"] for block in blocks]
        last = _came_last(blocks)
        fastest = min(work)
        for rank, own in enumerate(work):
            best = self._best[rank] = min(self._best.get(rank, own), own)
            self.scores[rank] = {
                "score": fastest / own if own else 1.0,
                "score_of_past": best / own if own else 1.0,
                "came_last": last[rank],
            }
        step = sum(block["seconds"] for block in blocks) / sum(block["steps"] for block in blocks)
        found, suspects = [], {}
        for rank, own in enumerate(work):
            others = statistics.median(work[:rank] + work[rank + 1 :])
            excess, bound = own - others, max(self._limit * step, _LEAST_SECONDS)
            if excess <= bound:
                self._named = {each for each in self._named if each[0] != rank}
                continue
            section = self._section(blocks, rank, timers)
            suspects[rank] = section
            sure = self._suspects.get(rank) == section or excess > _PLAIN * bound
            if sure and (rank, section) not in self._named:
                self._named.add((rank, section))
                found.append(SlowRank(rank, section, excess, step))
        self._suspects = suspects
        return found

    @staticmethod
    def _section(blocks: Sequence[Block], rank: int, timers: Sequence[str]) -> str:
        """The section with the largest excess over that of the other ranks."""
        names = {name: name for name in _NAMED}
        names |= {f"timer/{place}": name for place, name in enumerate(timers)}

        def excess(name: str) -> float:
            others = [block[f"median/{name}"] for r, block in enumerate(blocks) if r != rank]
            return blocks[rank][f"median/{name}"] - statistics.median(others)

        return names[max(names, key=excess)]


def _came_last(blocks: Sequence[Block]) -> list[float]:
    """For each rank, the fraction of steps in which it was the last to have its gradients."""
    stamps = np.stack([block.gradients for block in blocks])
    known = stamps[:, (stamps > 0).all(axis=0)]
    if not known.size:
        return [0.0] * len(blocks)
    last = known.argmax(axis=0)
    return [float((last == rank).mean()) for rank in range(len(blocks))]
