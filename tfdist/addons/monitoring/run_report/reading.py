"""Reads the files of a `Monitor`: traces, and reports as lines of JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from tfdist.backend.clock.intervals import common, union
from tfdist.utils.errors import TfdistError

#: A trace of more bytes is none of a Monitor's.
_MOST_BYTES = 1 << 30
_MICRO = 1e-6


class UnreadableError(TfdistError, ValueError):
    """A file is none of a Monitor's."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """What ran on a lane of a rank: a name, when in seconds since the trace began, and for how long."""

    rank: int
    lane: str
    name: str
    begin: float
    end: float
    is_communication: bool
    step: int | None


@dataclasses.dataclass(frozen=True)
class RankTimes:
    """What a rank did with the steps of a trace, in seconds of all of them.

    Attributes:
        rank: The rank.
        name: What the trace calls it.
        steps: How long the steps took.
        sections: By name; communication is that which nothing was computed beside.
        communication: How long some collective was under way.
        hidden: How much of that something was computed beside.
    """

    rank: int
    name: str
    steps: float
    sections: dict[str, float]
    communication: float
    hidden: float

    @property
    def overlap(self) -> float:
        """The share of communication that is hidden, as Holistic Trace Analysis defines it."""
        return self.hidden / self.communication if self.communication else 0.0

    @property
    def work(self) -> float:
        """The time in which the rank waited for no other."""
        return self.steps - self.sections.get("communication", 0.0)


@dataclasses.dataclass
class Run:
    """A training as its files tell it.

    Attributes:
        title: Where the files were.
        slices: Those of the traces.
        names: Of ranks.
        intervals: The reports of intervals.
        epochs: Those of epochs.
    """

    title: str
    slices: list[Slice] = dataclasses.field(default_factory=list)
    names: dict[int, str] = dataclasses.field(default_factory=dict)
    intervals: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    epochs: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def rank_times(self) -> list[RankTimes]:
        """What each rank of the trace did."""
        by_rank: dict[int, list[Slice]] = collections.defaultdict(list)
        for each in self.slices:
            by_rank[each.rank].append(each)
        return [self._times(rank, by_rank[rank]) for rank in sorted(by_rank)]

    def _times(self, rank: int, slices: Sequence[Slice]) -> RankTimes:
        lanes: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        sections: dict[str, float] = collections.defaultdict(float)
        for each in slices:
            kind = "communication" if each.is_communication else each.lane
            lanes[kind].append((each.begin, each.end))
            if not each.is_communication and each.lane not in ("step", "other threads"):
                sections[each.name] += each.end - each.begin
        computing, travelling = union(lanes["compute"]), union(lanes["communication"])
        hidden = sum(end - begin for begin, end in common(computing, travelling))
        whole = sum(end - begin for begin, end in union(travelling))
        steps = sum(end - begin for begin, end in lanes["step"])
        sections["communication"] = whole - hidden
        sections["other"] = max(steps - sum(sections.values()), 0.0)
        return RankTimes(
            rank, self.names.get(rank, f"rank {rank}"), steps, dict(sections), whole, hidden
        )


def read_run(path: str | os.PathLike) -> Run:
    """Reads a trace, a file of reports, or a folder of such files.

    Raises:
        UnreadableError: There is none, or one is damaged.
        OSError: A file cannot be read.
    """
    path = os.fspath(path)
    run = Run(os.path.basename(os.path.abspath(path)))
    if not os.path.isdir(path):
        _read_file(path, run, must=True)
    else:
        for name in sorted(os.listdir(path)):
            inside = os.path.join(path, name)
            if name.endswith((".json", ".jsonl")) and os.path.isfile(inside):
                _read_file(inside, run, must=False)
    if not (run.slices or run.intervals or run.epochs):
        raise UnreadableError(
            f"{path} has no trace and no reports of a Monitor, which `Monitor(trace=...)` and "
            "`Monitor(json=...)` write."
        )
    return run


def _read_file(path: str, run: Run, *, must: bool) -> None:
    """Adds a file to a run; in a folder other files of JSON are left out."""
    if os.path.getsize(path) > _MOST_BYTES:
        raise UnreadableError(f"{path} has more than {_MOST_BYTES >> 20} MiB.")
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and isinstance(found.get("traceEvents"), list):
        run.slices += _slices(found["traceEvents"], run.names)
        return
    count = len(run.intervals) + len(run.epochs)
    for line in text.splitlines():
        report = _report(line)
        if report is not None:
            (run.epochs if report["kind"] == "epoch" else run.intervals).append(report)
    if must and count == len(run.intervals) + len(run.epochs):
        raise UnreadableError(f"{path} is neither a trace nor a file of reports of a Monitor.")


def _slices(events: Sequence[Any], names: dict[int, str]) -> Iterator[Slice]:
    lanes: dict[tuple[int, int], str] = {}
    events = [event for event in events if isinstance(event, dict)]
    for event in events:
        if event.get("ph") != "M":
            continue
        name = str(_of(event, "args", dict).get("name", ""))
        if event.get("name") == "process_name":
            names[_whole(event, "pid")] = name
        elif event.get("name") == "thread_name":
            lanes[_whole(event, "pid"), _whole(event, "tid")] = name
    for event in events:
        if event.get("ph") != "X":
            continue
        rank, begin, length = _whole(event, "pid"), _number(event, "ts"), _number(event, "dur")
        step = _of(event, "args", dict).get("step")
        yield Slice(
            rank,
            lanes.get((rank, _whole(event, "tid")), "?"),
            str(event.get("name", "")),
            begin * _MICRO,
            (begin + max(length, 0.0)) * _MICRO,
            event.get("cat") == "communication",
            step if type(step) is int else None,
        )


def _of(event: dict, key: str, kind: type) -> Any:
    value = event.get(key)
    return value if isinstance(value, kind) else kind()


def _whole(event: dict, key: str) -> int:
    value = event.get(key)
    if type(value) is not int:
        raise UnreadableError(f"An event of the trace has no whole number as `{key}`.")
    return value


def _number(event: dict, key: str) -> float:
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e18:
        raise UnreadableError(f"An event of the trace has no finite number as `{key}`.")
    return float(value)


def _report(line: str) -> dict[str, Any] | None:
    """A line of a file of reports, with what is none of a number left out."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("kind") not in ("interval", "epoch"):
        return None
    step, epoch = found.get("step"), found.get("epoch")
    if type(step) is not int or type(epoch) is not int:
        return None
    return {
        "kind": found["kind"],
        "step": step,
        "epoch": epoch,
        "logs": _numbers(found.get("logs")),
        "sections": _numbers(found.get("sections")),
        "ranks": [each for each in found.get("ranks") or [] if isinstance(each, dict)]
        if isinstance(found.get("ranks"), list)
        else [],
    }


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        return {}
    return {
        str(name): float(each)
        for name, each in value.items()
        if isinstance(each, int | float) and abs(each) < 1e300
    }
