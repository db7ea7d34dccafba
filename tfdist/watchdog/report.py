"""The content of a heartbeat."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.runtime.channel import has_fields
from tfdist.utils.checks import one_line

#: The limits to which a report is cut, so that it fits into a message in a world of any size.
_MOST_RANKS = 20_000
_LONGEST_TEXT = 2000
#: The limit for a collective in which a rank is blocked, since the server sends it to all.
_LONGEST_NAME = 500
#: More ranks than these are packed if they are equally spaced.
_MOST_LISTED = 16

_WAIT = {"name": str, "ranks": (list, dict), "occurrence": int, "seconds": (int, float)}
_BLOCKED = {"name": str, "ranks": (list, dict), "needed": (list, dict), "occurrence": int}


@dataclasses.dataclass
class Report:
    """The state of a rank.

    Attributes:
        rank: The rank.
        waiting: The collectives under way: a list of dicts with `name`, `ranks`, `occurrence`
            and the duration `seconds`.
        blocked: The collectives that the main thread cannot leave before other ranks begin them: a list
            of dicts with `name`, `ranks`, `needed` and `occurrence`, as in
            `tfdist.collectives.flight_recorder.Blocked`.
        asked: The number of the server's last question.
        lacks: The indices of the collectives in that question that this rank has not begun.
        doing: The position of the main thread, in words.
        ended: Whether the rank has ended regularly.
        failed: The exception that ends the rank, or "".
        is_consequence: Whether it may have failed because another rank did: in a collective, or by an
            exception that another rank raised.
    """

    rank: int
    waiting: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    blocked: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    asked: int = 0
    lacks: list[int] = dataclasses.field(default_factory=list)
    doing: str = ""
    ended: bool = False
    failed: str = ""
    is_consequence: bool = False

    def to_message(self) -> dict[str, Any]:
        """The report as a JSON object; of very many collectives under way only the first ones."""
        waiting: list[dict[str, Any]] = []
        ranks = 0
        for wait in self.waiting:
            ranks += len(wait["ranks"]) + 1
            if waiting and ranks > _MOST_RANKS:
                break
            waiting.append({**_converted(wait, packed), "name": wait["name"][:_LONGEST_TEXT]})
        blocked = [
            _converted(call, packed) for call in self.blocked if len(call["name"]) <= _LONGEST_NAME
        ]
        cut = {"doing": self.doing[:_LONGEST_TEXT], "failed": self.failed[:_LONGEST_TEXT]}
        return {**vars(self), "waiting": waiting, "blocked": blocked, **cut}

    @classmethod
    def from_message(cls, message: dict[str, Any], size: int) -> Report:
        """Parses the result of `to_message` among `size` ranks; a `ValueError` for anything else."""
        kinds = {name: type(value) for name, value in vars(cls(-1)).items()}
        if not (
            has_fields(message, kinds)
            and 0 <= message["rank"] < size
            and all(_is_call(wait, _WAIT, size) for wait in message["waiting"])
            and all(_is_call(call, _BLOCKED, size) for call in message["blocked"])
            and all(len(call["name"]) <= _LONGEST_NAME for call in message["blocked"])
            and all(type(place) is int for place in message["lacks"])
        ):
            raise ValueError(f"a report that is not valid: {one_line(message, 200)}")
        lists = {
            of: [_converted(call, unpacked) for call in message[of]]
            for of in ("waiting", "blocked")
        }
        return cls(**(message | lists))

    @property
    def place(self) -> str:
        """The collective in which the rank waits, and the position of its main thread."""
        if self.waiting:
            return f"in {format_collective(self.waiting[0], self.doing)}"
        return f"at {self.doing}" if self.doing else ""


def format_collective(call: Mapping[str, Any], place: str = "") -> str:
    """An entry of `Report.waiting`, with the place of the call if that is known, for messages."""
    return f"{call['name']} (call {call['occurrence']})" + (f", called at {place}" if place else "")


def format_ranks(ranks: Sequence[int]) -> str:
    """Some ranks, for messages: "rank 1" or "ranks 1, 2"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def packed(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    """Ranks for a message: of many that are equally spaced, such as those of an axis, only the ends.

    In a world of thousands each rank reports groups of thousands, which the server has to parse.
    """
    if len(ranks) > _MOST_LISTED and ranks[1] > ranks[0]:
        spaced = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if len(spaced) == len(ranks) and all(map(operator.eq, ranks, spaced)):
            return {"first": ranks[0], "last": ranks[-1], "step": spaced.step}
    return list(ranks)


def unpacked(ranks: list[int] | dict[str, int]) -> Sequence[int]:
    """The inverse of `packed`."""
    if isinstance(ranks, dict):
        return range(ranks["first"], ranks["last"] + 1, ranks["step"])
    return ranks


def _converted(call: Mapping[str, Any], convert: Callable) -> dict[str, Any]:
    """A collective whose lists of ranks are packed or unpacked."""
    return {**call, **{key: convert(call[key]) for key in ("ranks", "needed") if key in call}}


def _is_call(call: Any, kinds: Mapping[str, Any], size: int) -> bool:
    return (
        has_fields(call, kinds)
        and abs(call.get("seconds", 0)) < 1e15
        and all(_are_ranks(call[key], size) for key in ("ranks", "needed") if key in call)
    )


def _are_ranks(ranks: Any, size: int) -> bool:
    """Whether a field of a message contains ranks, listed or packed."""
    if isinstance(ranks, dict):
        return (
            has_fields(ranks, {"first": int, "last": int, "step": int})
            and 0 <= ranks["first"] <= ranks["last"] < size
            and ranks["step"] >= 1
        )
    return bool(ranks) and all(type(rank) is int and 0 <= rank < size for rank in ranks)


def silent_for(seconds: float) -> str:
    """The diagnosis of a rank that has not reported for a time."""
    return f"has shown no sign of life for {seconds:.0f} s: it is frozen, or its machine is unreachable."


def last_seen(report: Report) -> str:
    """The last reported place of a rank as an additional sentence, or ""."""
    return f" Last seen {report.place}." if report.place else ""


def whereabouts(report: Report | None) -> str:
    """The state of a rank for which others wait."""
    if report is None:
        return "never sent a heartbeat."
    if report.ended:
        return "has ended."
    if report.waiting:
        return f"waits instead {report.place}."
    return f"is {report.place or 'alive'}."
