"""From the stamps of a step to what its time went into: sections that add up to the step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

from tfdist.addons.monitoring.monitor.watch import Execution
from tfdist.backend.clock.intervals import Interval, common, length, union, without
from tfdist.backend.clock.rows import Row
from tfdist.backend.clock.stamps import Timed

#: What the time of a step is divided into; sections of timers come beside them.
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
        lane: What carried it.
        begin: When this rank had what it gives, in seconds since the epoch.
        end: When this rank had the result.
        sent: The bytes that this rank sends for it, as rings and direct exchanges do.
        in_background: Whether the step went on meanwhile.
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
        seconds: By section how long; they add up to the step.
        hidden: Seconds of communication beside the computation.
        travelling: Seconds in which a collective was under way.
        sent: Bytes that this rank sent.
        rows: How many samples this rank had.
        tokens: How many tokens; 0 where the data are none.
        gradients: When this rank had its gradients; not a number where nothing says.
        spans: What ran when, by (section, begin, end).
        calls: The collectives.
        row: What its graph noted; None where it notes nothing.
    """

    begin: float
    end: float
    seconds: dict[str, float]
    hidden: float = 0.0
    travelling: float = 0.0
    sent: float = 0.0
    rows: float = 0.0
    tokens: float = 0.0
    gradients: float = math.nan
    spans: list[tuple[str, float, float]] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    row: Row | None = None


def steps_of(execution: Execution, timers: Sequence[Timed]) -> list[Step]:
    """The steps of a call of the training function that is closed.

    Args:
        execution: The call.
        timers: What timers have measured meanwhile in the thread that trains.
    """
    if execution.close is None:
        raise ValueError("The call is not over.")
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
    """Divides the part of a step that its graph ran."""
    start = row.first("start")
    # A cell of a graph that another step wrote, or that nothing has written.
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
    travelling = union((call.begin, call.end) for call in step.calls)
    step.hidden = length(common(travelling, union([*updates, *rest])))
    step.travelling = length(travelling)
    step.sent = sum(call.sent for call in step.calls)


def _in_step(stamps: Iterable[float], start: float) -> Iterable[float]:
    """Those of this step: what a branch did not reach has the stamp of an earlier one."""
    return [stamp for stamp in stamps if stamp >= start]


def _calls(row: Row, start: float) -> list[Call]:
    found, numbers = [], row.numbers
    for places in row.columns.calls:
        column, begin, end = places.column, numbers[places.begin], numbers[places.end]
        if not start <= begin <= end:
            continue  # Of a branch that was not taken.
        sends = _sends(column.name.partition("/")[0], len(column.ranks))
        sent = places.bytes_in(numbers) * sends
        found.append(
            Call(column.name, column.lane, begin, end, sent, column.in_background, column.ranks)
        )
    return found


@functools.cache
def _sends(operation: str, size: int) -> float:
    """How often a rank sends the bytes that it gives to an operation."""
    if size < 2:
        return 0.0
    return {
        "all_reduce": 2 * (size - 1) / size,
        "all_gather": float(size - 1),
        "reduce_scatter": (size - 1) / size,
        "all_to_all": (size - 1) / size,
    }.get(operation, 1.0)


def _add_host(step: Step, begin: float, end: float, timers: Sequence[Timed]) -> None:
    """Divides what is between two calls of the training function."""
    taken: list[Interval] = []
    # The innermost, which end first, take their time; what is around them gets the rest.
    for timed in sorted(timers, key=lambda each: (each.end, -each.begin)):
        own = common([(timed.begin, timed.end)], [(begin, end)])
        for low, high in without(own, union(taken)):
            step.spans.append((timed.name, low, high))
        taken += own
    step.spans += [("callbacks", low, high) for low, high in without([(begin, end)], union(taken))]
