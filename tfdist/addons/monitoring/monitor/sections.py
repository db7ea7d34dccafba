"""The time of a step, from its stamps, by sections that add up to the step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from tfdist.addons.monitoring.intervals import Interval, common, length, union
from tfdist.addons.monitoring.monitor.watch import Execution
from tfdist.backend.clock.rows import Row
from tfdist.backend.clock.stamps import Timed

#: The sections of a step; those of timers are added to them.
SECTIONS = (
    "input",
    "forward_backward",
    "communication",
    "optimizer",
    "callbacks",
    "checkpoint",
    "monitor",
    "other",
)


@dataclasses.dataclass(frozen=True)
class Call:
    """A collective, or a message, of a step.

    Attributes:
        name: Its name, the same on all ranks that take part.
        lane: The transport.
        begin: When this rank's input was ready, in seconds since the epoch.
        end: When this rank had the result.
        sent: The bytes that this rank sends for it, as in rings and direct exchanges.
        in_background: Whether the step continued meanwhile.
        ranks: The ranks that take part.
    """

    name: str
    lane: str
    begin: float
    end: float
    sent: float
    in_background: bool
    ranks: tuple[int, ...] = ()


@dataclasses.dataclass
class Step:
    """One training step of this rank.

    Attributes:
        begin: When it began, in seconds since the epoch.
        end: When the next one began.
        seconds: The seconds by section; they add up to the step.
        hidden: The seconds of communication during computation.
        communicating: The seconds in which a collective was in progress.
        sent: The bytes that this rank sent.
        rows: The number of samples of this rank.
        tokens: The number of tokens; 0 where the data are not tokens.
        gradients: When this rank had its gradients; NaN where that was not recorded.
        spans: The intervals of sections, as (section, begin, end).
        calls: The collectives.
        row: The row that its graph recorded; None where there is none.
    """

    begin: float
    end: float
    seconds: dict[str, float]
    hidden: float = 0.0
    communicating: float = 0.0
    sent: float = 0.0
    rows: float = 0.0
    tokens: float = 0.0
    gradients: float = math.nan
    spans: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    row: Row | None = None


def steps_of(execution: Execution, timers: Sequence[Timed]) -> list[Step]:
    """The steps of a closed call of the training function.

    Args:
        execution: The call.
        timers: The measurements of timers in the training thread.

    Raises:
        ValueError: The call is not closed.
    """
    if execution.close is None:
        raise ValueError("The call must be closed. Received: a call without an end.")
    rows: list[Row | None] = [*execution.rows] or [None]
    steps, begin = [], execution.begin
    for number, row in enumerate(rows):
        is_last = number + 1 == len(rows)
        inside = execution.end if is_last or row is None else row.first("end")
        end = execution.close if is_last else inside
        step = Step(begin, end, dict.fromkeys(SECTIONS, 0.0), row=row)
        if row is None:
            step.spans = [("forward_backward", begin, inside)]
        else:
            waits_from = row.first("begin") if number == 0 else begin
            _read(step, row, waits_from, inside)
        if is_last:
            _add_host(step, inside, end, timers)
        begin = end
        for section, low, high in step.spans:
            step.seconds[section] = step.seconds.get(section, 0.0) + high - low
        steps.append(step)
    return steps


def _read(step: Step, row: Row, waits_from: float, inside: float) -> None:
    """Divides the part of a step that its graph ran into sections."""
    start = row.first("start")
    # The cell of a graph may have been written by another step, or not at all.
    waits_from = waits_from if step.begin <= waits_from <= start else step.begin
    end = min(max(row.first("end"), start), inside)
    step.rows, step.tokens = row.first("rows", 0.0), row.first("tokens", 0.0)
    step.calls = _calls(row, start)
    optimizer, exposed = [], []
    reduced, last = list(_in_step(row.all_of("reduced"), start)), start
    gradients = list(_in_step(row.all_of("gradients"), start))
    step.gradients = min(gradients, default=math.nan)
    for begun, updated in zip(row.all_of("apply"), row.all_of("updated"), strict=True):
        if updated < start:
            continue
        begun, updated = max(begun, last), max(updated, last)
        for ready, there in zip(gradients, reduced, strict=False):
            if begun <= there <= updated:
                exposed.append((max(ready, begun), there))
                begun = max(there, begun)
        optimizer.append((begun, updated))
        last = updated
    end = max(end, last)
    end = min(end, inside)
    computing = [(start, end)]
    waited = union([*exposed, *((c.begin, c.end) for c in step.calls if not c.in_background)])
    waited = common(waited, computing)
    updates = without(common(union(optimizer), computing), waited)
    rest = without(without(computing, waited), updates)
    step.spans = [
        ("other", step.begin, waits_from),
        ("input", waits_from, start),
        *(("communication", *each) for each in waited),
        *(("optimizer", *each) for each in updates),
        *(("forward_backward", *each) for each in rest),
        ("other", end, inside),
    ]
    step.spans = [span for span in step.spans if span[2] > span[1]]
    communicating = union((call.begin, call.end) for call in step.calls)
    step.hidden = length(common(communicating, union([*updates, *rest])))
    step.communicating = length(communicating)
    step.sent = sum(call.sent for call in step.calls)


def _in_step(stamps: Iterable[float], start: float) -> Iterable[float]:
    """The stamps of this step: a branch that did not run has the stamp of an earlier one."""
    return [stamp for stamp in stamps if stamp >= start]


def _calls(row: Row, start: float) -> list[Call]:
    found, numbers = [], row.numbers
    for begins_at, ends_at, size_at in row.columns.calls:
        column, begin, end = row.columns[begins_at], numbers[begins_at], numbers[ends_at]
        if not start <= begin <= end:
            continue  # The call is in a branch that was not taken.
        sends = _sends(column.name.partition("/")[0], len(column.ranks))
        size = column.size if size_at is None else numbers[size_at]
        sent = float(size or 0) * sends
        found.append(
            Call(column.name, column.lane, begin, end, sent, column.in_background, column.ranks)
        )
    return found


@functools.cache
def _sends(operation: str, size: int) -> float:
    """The number of times that a rank sends the bytes of its input in an operation."""
    if size < 2:
        return 0.0
    return {
        "all_reduce": 2 * (size - 1) / size,
        "all_gather": float(size - 1),
        "reduce_scatter": (size - 1) / size,
        "all_to_all": (size - 1) / size,
    }.get(operation, 1.0)


def _add_host(step: Step, begin: float, end: float, timers: Sequence[Timed]) -> None:
    """Divides the time between two calls of the training function into sections."""
    taken: list[Interval] = []
    # Inner timers end first and get their own time; those around them get the rest.
    for timed in sorted(timers, key=lambda each: (each.end, -each.begin)):
        own = common([(timed.begin, timed.end)], [(begin, end)])
        for low, high in without(own, union(taken)):
            step.spans.append((timed.name, low, high))
        taken += own
    step.spans += [("callbacks", low, high) for low, high in without([(begin, end)], union(taken))]


def without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The difference of two unions."""
    found = []
    for begin, end in one:
        for low, high in other:
            if high <= begin or low >= end:
                continue
            if low > begin:
                found.append((begin, low))
            begin = high
        if end > begin:
            found.append((begin, end))
    return found
