"""The proof that ranks wait for each other, and that none of them can ever continue.

A rank is blocked in a call of a collective if its main thread cannot leave it before certain other ranks
have begun it, and no other thread of the rank calls collectives
(`tfdist.collectives.flight_recorder.FlightRecorder.blocked`). Say that A depends on B if A is blocked in a
call that needs B, B has not begun it, and B is blocked as well. B can begin nothing more before it has left
the call in which it is blocked. So if ranks depend on each other in a cycle none can be the first to
continue: all of them are blocked forever, and so is any rank that needs one of them. The duration of the
wait does not matter.

Their reports must hold at one moment. The server asks all ranks which calls of a list they have not
begun. A rank counts if it was blocked in the same call, by its name and its number, in the report before the
question and in the answer: then it was blocked throughout, and also when the question was sent. A call
that it had not begun at the answer it had not begun then either.

A graph may end without the collectives that it waits for: by an exception of another of its operations. So a
rank counts as blocked in a graph only while no thread of its process works: the only operations that could
still raise there are those that sleep.

Ranks that are slow, or that compute, load or save depend on no rank. A message under way does not count, nor
does a broadcast at its root: they may end before the other ranks begin them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.watchdog.hints import likely_cause
from tfdist.watchdog.report import Report, format_collective, format_ranks, packed, unpacked

#: The maximum number of calls in a question; in a large world many ranks are in the same ones.
_MOST_ASKED = 32
#: How often a question is repeated for ranks that have not answered.
_REPEATED = 5
#: The maximum number of lines in a verdict, and of ranks in a line.
_MOST_LINES = 8
_MOST_RANKS = 8


def _key(call: Mapping[str, Any]) -> tuple:
    # The ranks of a large group are a range, which is hashable.
    ranks = call["ranks"]
    return call["name"], ranks if isinstance(ranks, range) else tuple(ranks), call["occurrence"]


class DeadlockProof:
    """The server's part: asks, and evaluates the answers of the ranks."""

    def __init__(self) -> None:
        self._number = 0
        self._told = 0
        self._calls: list[tuple] = []
        self._before: dict[int, set[tuple]] = {}

    def question(self, reports: Mapping[int, Report]) -> list | None:
        """The question for all ranks: a number and calls; None if no two ranks are blocked in two calls.

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
            # If there is only one call, all its ranks have begun it.
            self._calls = calls[:_MOST_ASKED] if len(calls) > 1 else []
            self._before, self._told = blocked, 0
            self._number += bool(self._calls)
        if not self._calls:
            return None
        self._told += 1
        return [self._number, [[name, packed(ranks), n] for name, ranks, n in self._calls]]

    def verdict(self, reports: Mapping[int, Report]) -> str:
        """The message that ranks wait for each other, and where; "" if that is not proved.

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
        # Ranks that depend on none of the rest may continue; the remaining ones contain a cycle.
        while True:
            missing = {key: ranks & stuck.keys() for key, ranks in lacking.items()}
            rest = {
                rank: kept
                for rank, calls in stuck.items()
                if (kept := [call for call in calls if _depends(call, missing)])
            }
            if rest.keys() == stuck.keys():
                return _verdict(rest, lacking, reports) if rest else ""
            stuck = rest


def _depends(call: Mapping[str, Any], missing: Mapping[tuple, set[int]]) -> bool:
    # Without missing ranks the whole of a large group would be searched.
    found = missing.get(_key(call), set())
    return bool(found) and not found.isdisjoint(call["needed"])


def _verdict(
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
            f"  {_some(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in "
            f"{format_collective(call, place)}; {_some(missing)} did not reach it."
        )
    return (
        f"{next(filter(None, causes), '')}{_some(sorted(stuck)).capitalize()} wait for each other, and "
        "none can continue. All ranks must make the same calls in the same order.\n"
        + "\n".join(lines)
    )


def _some(ranks: Sequence[int]) -> str:
    more = len(ranks) - _MOST_RANKS
    return format_ranks(ranks[:_MOST_RANKS]) + (f" and {more} more" if more > 0 else "")


def answer(
    question: Any, has_begun: Callable[[str, Sequence[int], int], bool]
) -> tuple[int, list[int]]:
    """A rank's part: the number of a question, and the indices of the calls that it has not begun.

    Args:
        question: The result of `DeadlockProof.question`, or None.
        has_begun: Whether this rank has begun a call, given by its name, ranks and number.
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
