"""What a rank says of itself in a heartbeat."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

from tfdist.utils.checks import one_line

#: What a report is cut to, so that it fits into a message in a world of any size.
_MOST_RANKS = 20_000
_LONGEST_TEXT = 2000
#: Of a collective that a rank is blocked in, since the server sends it to all.
_LONGEST_NAME = 500
#: More ranks than these are packed where they are equally far apart.
_MOST_LISTED = 16


@dataclasses.dataclass
class Report:
    """What a rank says of itself.

    Attributes:
        rank: The rank.
        waiting: The collectives under way: a list of dicts with `name`, `ranks`, `occurrence`
            and `seconds`, how long.
        blocked: What the main thread cannot leave before other ranks come: a list of dicts with `name`,
            `ranks`, `needed` and `occurrence`, as in `tfdist.collectives.flight_recorder.Blocked`.
        asked: The last question of the server, by its number.
        lacks: Which of the collectives that it asked for this rank has not begun, by their places.
        doing: Where the main thread stands, in words.
        ended: Said goodbye.
        failed: The exception that ends it, or "".
        in_collective: Whether a collective was under way when it failed.
    """

    rank: int
    waiting: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    blocked: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    asked: int = 0
    lacks: list[int] = dataclasses.field(default_factory=list)
    doing: str = ""
    ended: bool = False
    failed: str = ""
    in_collective: bool = False

    def to_message(self) -> dict[str, Any]:
        """The report as a JSON object; of very many collectives under way only the first."""
        waiting: list[dict[str, Any]] = []
        ranks = 0
        for wait in self.waiting:
            ranks += len(wait["ranks"]) + 1
            if waiting and ranks > _MOST_RANKS:
                break
            short = {"name": wait["name"][:_LONGEST_TEXT], "ranks": packed(wait["ranks"])}
            waiting.append({**wait, **short})
        blocked = [
            {**call, "ranks": packed(call["ranks"]), "needed": packed(call["needed"])}
            for call in self.blocked
            if len(call["name"]) <= _LONGEST_NAME
        ]
        cut = {"doing": self.doing[:_LONGEST_TEXT], "failed": self.failed[:_LONGEST_TEXT]}
        return {**vars(self), "waiting": waiting, "blocked": blocked, **cut}

    @classmethod
    def from_message(cls, message: dict[str, Any], size: int) -> Report:
        """Reads what `to_message` made among `size` ranks; a `ValueError` for anything else."""
        report = cls(-1)
        fields = {field.name for field in dataclasses.fields(cls)}
        if message.keys() != fields:
            wrong = sorted(message.keys() ^ fields)
            raise ValueError(f"a report whose fields are wrong: {one_line(wrong, 200)}")
        for name, value in message.items():
            if type(value) is not type(getattr(report, name)):
                raise ValueError(f"a report with {name}={one_line(value, 100)!r}")
            setattr(report, name, value)
        if not 0 <= report.rank < size:
            raise ValueError(f"a report of rank {report.rank}, of {size} ranks")
        if not all(_is_wait(wait, size) for wait in report.waiting):
            raise ValueError("a report with a malformed list of collectives")
        if not all(_is_blocked(call, size) for call in report.blocked) or not all(
            type(place) is int for place in report.lacks
        ):
            raise ValueError("a report with a malformed list of what it is blocked in")
        report.waiting = [{**wait, "ranks": unpacked(wait["ranks"])} for wait in report.waiting]
        report.blocked = [
            {**call, "ranks": unpacked(call["ranks"]), "needed": unpacked(call["needed"])}
            for call in report.blocked
        ]
        return report


def collective_words(wait: dict[str, Any]) -> str:
    """An entry of `Report.waiting`, for messages."""
    return f"{wait['name']} (call {wait['occurrence']})"


def rank_words(ranks: Sequence[int]) -> str:
    """Some ranks, for messages: "rank 1" or "ranks 1, 2"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def _is_wait(wait: Any, size: int) -> bool:
    return (
        isinstance(wait, dict)
        and wait.keys() == {"name", "ranks", "occurrence", "seconds"}
        and isinstance(wait["name"], str)
        and type(wait["occurrence"]) is int
        and type(wait["seconds"]) in (int, float)
        and math.isfinite(wait["seconds"])
        and _are_ranks(wait["ranks"], size)
    )


def _is_blocked(call: Any, size: int) -> bool:
    return (
        isinstance(call, dict)
        and call.keys() == {"name", "ranks", "needed", "occurrence"}
        and isinstance(call["name"], str)
        and len(call["name"]) <= _LONGEST_NAME
        and type(call["occurrence"]) is int
        and _are_ranks(call["ranks"], size)
        and _are_ranks(call["needed"], size)
    )


def packed(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    """Ranks for a message: of many that lie equally far apart, as those of an axis do, the ends alone.

    In a world of thousands each rank reports groups of thousands, which the server would have to read.
    """
    if len(ranks) > _MOST_LISTED and ranks[1] > ranks[0]:
        spaced = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if len(spaced) == len(ranks) and all(map(operator.eq, ranks, spaced)):
            return {"first": ranks[0], "last": ranks[-1], "step": spaced.step}
    return list(ranks)


def unpacked(ranks: list[int] | dict[str, int]) -> Sequence[int]:
    """What `packed` made of ranks."""
    if isinstance(ranks, dict):
        return range(ranks["first"], ranks["last"] + 1, ranks["step"])
    return ranks


def _are_ranks(ranks: Any, size: int) -> bool:
    """Whether a message has ranks there, listed or packed."""
    if isinstance(ranks, dict):
        return (
            ranks.keys() == {"first", "last", "step"}
            and all(type(value) is int for value in ranks.values())
            and 0 <= ranks["first"] <= ranks["last"] < size
            and ranks["step"] >= 1
        )
    return (
        isinstance(ranks, list)
        and bool(ranks)
        and all(type(rank) is int and 0 <= rank < size for rank in ranks)
    )


def silent_for(seconds: float) -> str:
    """What is said of a rank that has not reported for so long."""
    return (
        f"has shown no sign of life for {seconds:.0f} s: it is frozen, or its machine cannot be "
        "reached."
    )


def last_seen(report: Report) -> str:
    """Where a rank was when it last reported, as one more sentence, or ""."""
    if report.waiting:
        place = f", called at {report.doing}" if report.doing else ""
        return f" Last seen in {collective_words(report.waiting[0])}{place}."
    return f" Last seen at {report.doing}." if report.doing else ""


def whereabouts(report: Report | None) -> str:
    """Where a rank is that others wait for."""
    if report is None:
        return "never sent a heartbeat."
    if report.ended:
        return "has ended."
    if report.waiting:
        place = f", called at {report.doing}" if report.doing else ""
        return f"waits in {collective_words(report.waiting[0])} instead{place}."
    return f"is at {report.doing}."
