"""Reads the files of a `Monitor`: traces, and reports as lines of JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from tfdist.addons.monitoring.intervals import common, union
from tfdist.utils.errors import TfdistError

#: A trace with more bytes cannot be from a Monitor.
_MOST_BYTES = 1 << 30
_MICRO = 1e-6


class UnreadableError(TfdistError, ValueError):
    """A file was not written by a Monitor."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """An interval on a lane of a rank: a name, and its times in seconds since the trace began."""

    rank: int
    lane: str
    name: str
    begin: float
    end: float
    is_communication: bool
    step: int | None


@dataclasses.dataclass(frozen=True)
class RankTimes:
    """The times of a rank in a trace, in seconds over all its steps.

    Attributes:
        rank: The rank.
        name: Its name in the trace.
        steps: The time of the steps.
        sections: The times by section; communication is the part without computation at the same time.
        communication: The time in which a collective was in progress.
        hidden: The part of that time with computation at the same time.
    """

    rank: int
    name: str
    steps: float
    sections: dict[str, float]
    communication: float
    hidden: float

    @property
    def overlap(self) -> float:
        """The fraction of communication that is hidden, as Holistic Trace Analysis defines it."""
        return self.hidden / self.communication if self.communication else 0.0

    @property
    def work(self) -> float:
        """The time in which the rank did not wait for others."""
        return self.steps - self.sections.get("communication", 0.0)


@dataclasses.dataclass
class Run:
    """A training, as read from its files.

    Attributes:
        title: The name of the file or folder.
        slices: The slices of the traces.
        names: The names of ranks.
        intervals: The reports of intervals.
        epochs: The reports of epochs.
    """

    title: str
    slices: list[Slice] = dataclasses.field(default_factory=list)
    names: dict[int, str] = dataclasses.field(default_factory=dict)
    intervals: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    epochs: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def rank_times(self) -> list[RankTimes]:
        """The times of each rank of the trace."""
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
        computing, communicating = union(lanes["compute"]), union(lanes["communication"])
        hidden = sum(end - begin for begin, end in common(computing, communicating))
        whole = sum(end - begin for begin, end in union(communicating))
        steps = sum(end - begin for begin, end in lanes["step"])
        sections["communication"] = whole - hidden
        sections["other"] = max(steps - sum(sections.values()), 0.0)
        return RankTimes(
            rank, self.names.get(rank, f"rank {rank}"), steps, dict(sections), whole, hidden
        )


def read_run(path: str | os.PathLike) -> Run:
    """Reads a trace, a file of reports, or a folder of such files.

    Raises:
        UnreadableError: There is none, or one is not valid.
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
            f"A run requires a trace or reports of a Monitor. Received: {path}, which has none. Write "
            "them with `Monitor(trace=...)` or `Monitor(json=...)`."
        )
    return run


def _read_file(path: str, run: Run, *, must: bool) -> None:
    """Adds a file to a run; other JSON files of a folder are ignored."""
    if os.path.getsize(path) > _MOST_BYTES:
        raise UnreadableError(f"A file must not exceed {_MOST_BYTES >> 20} MiB. Received: {path}.")
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
        raise UnreadableError(f"{path} is not a trace or a file of reports of a Monitor.")


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
        raise UnreadableError(f"`{key}` of an event of the trace must be an integer.")
    return value


def _number(event: dict, key: str) -> float:
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e18:
        raise UnreadableError(f"`{key}` of an event of the trace must be a finite number.")
    return float(value)


def _report(line: str) -> dict[str, Any] | None:
    """A line of a file of reports, without entries that are not numbers; None for other lines."""
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
