"""The proof that ranks wait for each other, and that none of them can ever go on.

A rank is blocked in a call of a collective if its main thread cannot leave it before certain other ranks
have begun it, and no other thread of the rank calls collectives
(`tfdist.collectives.flight_recorder.FlightRecorder.blocked`). Say that A leans on B where A is blocked in a
call that needs B, B has not begun it, and B is blocked as well. B can begin nothing more before it has left
what it is blocked in. So where ranks lean on each other in a circle none can be the first to go on: all
of them are blocked for ever, and so is whoever needs one of them. How long they have waited does not matter.

What they say must hold at one moment. The server asks all ranks which calls of a list they have not
begun. A rank counts if it was blocked in the same call, by its name and its number, in the report before the
question and in the answer: then it was so all the time between, and also when the question was sent. A call
that it had not begun at the answer it had not begun then either.

A graph may end without what it waits for: by an exception of another of its operations. So a rank counts as
blocked in a graph only while no thread of its process works: what could still raise there is an operation
that sleeps.

Ranks that are slow, that work, load or save lean on nobody. A message under way does not count, nor
does a broadcast at its root: they may end before the others come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.watchdog.hints import likely_cause
from tfdist.watchdog.report import Report, collective_words, packed, rank_words, unpacked

#: So many calls are asked for at once; in a large world many ranks are in the same ones.
_MOST_ASKED = 32
#: How often a question is repeated for those that have not answered.
_REPEATED = 5
#: A verdict lists no more lines than these.
_MOST_LINES = 8


#: Of many ranks, a line names no more than these.
_MOST_RANKS = 8


def _key(call: Mapping[str, Any]) -> tuple:
    return call["name"], _hashable(call["ranks"]), call["occurrence"]


def _hashable(ranks: Sequence[int]) -> Sequence[int]:
    """Ranks as a key. Those of a large group are a range already."""
    return ranks if isinstance(ranks, range) else tuple(ranks)


class DeadlockProof:
    """The server's part: asks, and judges what ranks answer."""

    def __init__(self) -> None:
        self._number = 0
        self._told = 0
        self._calls: list[tuple] = []
        self._before: dict[int, set[tuple]] = {}

    def question(self, reports: Mapping[int, Report]) -> list | None:
        """What to ask all ranks: a number and calls; None where no two ranks are blocked apart.

        Args:
            reports: The last report of each rank.
        """
        silent = [rank for rank in self._before if reports[rank].asked != self._number]
        if not (self._calls and silent and self._told < _REPEATED):
            blocked = {
                rank: {_key(call) for call in report.blocked}
                for rank, report in reports.items()
                if report.blocked and not (report.ended or report.failed)
            }
            calls = list(dict.fromkeys(key for keys in blocked.values() for key in sorted(keys)))
            # All that are in one call have begun it.
            self._calls = calls[:_MOST_ASKED] if len(calls) > 1 else []
            self._before, self._told = blocked, 0
            self._number += bool(self._calls)
        if not self._calls:
            return None
        self._told += 1
        return [self._number, [[name, packed(ranks), n] for name, ranks, n in self._calls]]

    def verdict(self, reports: Mapping[int, Report]) -> str:
        """Which ranks wait for each other, and where; "" where that is not proved.

        Args:
            reports: The last report of each rank.
        """
        if not self._calls:
            return ""
        stuck: dict[int, list[dict[str, Any]]] = {}
        for rank, before in self._before.items():
            report = reports[rank]
            if report.asked == self._number and not (report.ended or report.failed):
                stuck[rank] = [call for call in report.blocked if _key(call) in before]
        lacking = {
            key: {rank for rank in stuck if place in reports[rank].lacks}
            for place, key in enumerate(self._calls)
        }
        # Whoever leans on none of the rest may go on; what is left holds a circle.
        while True:
            missing = {key: ranks & stuck.keys() for key, ranks in lacking.items()}
            rest = {
                rank: kept
                for rank, calls in stuck.items()
                if (kept := [call for call in calls if _leans(call, missing)])
            }
            if rest.keys() == stuck.keys():
                return _words(rest, lacking, reports) if rest else ""
            stuck = rest


def _leans(call: Mapping[str, Any], missing: Mapping[tuple, set[int]]) -> bool:
    found = missing.get(_key(call))
    # Of none the whole of a large group would be looked through.
    return found is not None and bool(found) and not found.isdisjoint(call["needed"])


def _words(
    stuck: Mapping[int, list[dict[str, Any]]], lacking, reports: Mapping[int, Report]
) -> str:
    places: dict[tuple, list[int]] = {}
    for rank, calls in sorted(stuck.items()):
        places.setdefault((_key(calls[0]), reports[rank].doing), []).append(rank)
    causes, lines = [], []
    for (key, place), ranks in list(places.items())[:_MOST_LINES]:
        call = stuck[ranks[0]][0]
        missing = sorted((lacking[key] & stuck.keys()).intersection(call["needed"]))
        causes.append(likely_cause(key[0], ranks, missing))
        lines.append(
            f"  {_some(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {collective_words(call)}, "
            f"called at {place}; {_some(missing)} did not come to it."
        )
    return (
        f"{next(filter(None, causes), '')}{_some(sorted(stuck)).capitalize()} wait for each other, and "
        "none can go on. All ranks make the same calls in the same order.\n" + "\n".join(lines)
    )


def _some(ranks: Sequence[int]) -> str:
    more = len(ranks) - _MOST_RANKS
    return rank_words(ranks[:_MOST_RANKS]) + (f" and {more} more" if more > 0 else "")


def answer(
    question: Any, has_begun: Callable[[str, Sequence[int], int], bool]
) -> tuple[int, list[int]]:
    """A rank's part: the number of a question, and the places of the calls that it has not begun.

    Args:
        question: As of `DeadlockProof.question`, or None.
        has_begun: Whether this rank has begun a call, of its name, ranks and number.
    """
    if not question:
        return 0, []
    number, calls = question
    lacks = [
        place
        for place, (name, ranks, occurrence) in enumerate(calls)
        if not has_begun(name, unpacked(ranks), occurrence)
    ]
    return number, lacks
