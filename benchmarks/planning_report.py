"""What the benchmark of the planner has measured, beside what the planner says."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.measuring import write_between
from benchmarks.planning_cases import LINK_CASE, Case
from tfdist.addons.planner import Estimate, Layout, Link, Machine, estimate
from tfdist.addons.planner.simulation import play
from tfdist.launch.plan.calibrating import link_of
from tfdist.pipeline.schedules import make_schedule

_MARK = "benchmarks.planning"
_MEAN, _WORST, _MEMORY, _BUBBLE, _STEP = 0.10, 0.25, 0.10, 0.10, 0.10
_FEW = 3
_MIB = 1 << 20


def read(path: str) -> dict[str, Any]:
    """The measurements of a file; none where there is no file."""
    file = Path(path)
    return json.loads(file.read_text()) if file.exists() else {}


def key(row: dict[str, Any]) -> str:
    """What a row is the measurement of."""
    named = ("case", "schedule", "stages", "rate")
    return json.dumps({name: row[name] for name in named if name in row}, sort_keys=True)


@dataclasses.dataclass(frozen=True)
class _Row:
    case: Case
    found: Estimate
    seconds: float
    bytes: float

    @property
    def error(self) -> float:
        return self.found.step_seconds / self.seconds - 1

    @property
    def bytes_error(self) -> float:
        return self.found.memory.total / self.bytes - 1


def report(path: str, machine: Machine, document: str | None) -> int:
    """Prints the tables, writes them to a document, and returns 1 where an error is above its limit."""
    measured = read(path)
    writers: dict[str, Callable[[Any, Machine], tuple[str, str, bool]]] = {
        "layouts": _layouts,
        "limits": _limits,
        "schedules": _schedules,
        "hosts": _hosts,
    }
    all_good = True
    for part, write in writers.items():
        if not measured.get(part):
            print(f"{part}: nothing measured.\n")
            continue
        table, words, good = write(measured[part], machine)
        all_good &= good
        print(f"{table}\n\n{words}\n")
        if document:
            write_between(document, f"{_MARK}: {part}", f"{table}\n\n{words}")
    return 0 if all_good else 1


def _on_this(machine: Machine, case: Case) -> Estimate:
    here = machine.replace(ranks_per_host=case.layout.ranks)
    return estimate(case.sizes, here, case.layout, global_batch=case.batch)


def _table(rows: Sequence[Sequence[Any]], *head: str) -> str:
    return tabulate(rows, head, tablefmt="github", disable_numparse=True)


def _times(rows: Sequence[_Row]) -> str:
    head = (
        *("ranks", "model", "layout", "predicted, ms", "measured, ms", "off by"),
        *("predicted, MiB", "measured, MiB", "off by"),
    )
    lines = [
        (
            row.case.layout.ranks,
            row.case.name,
            row.case.layout.words(),
            f"{1e3 * row.found.step_seconds:,.0f}",
            f"{1e3 * row.seconds:,.0f}",
            f"{row.error:+.0%}",
            f"{row.found.memory.total / _MIB:,.0f}",
            f"{row.bytes / _MIB:,.0f}",
            f"{row.bytes_error:+.0%}",
        )
        for row in rows
    ]
    return _table(lines, *head)


def _layouts(measured: Any, machine: Machine) -> tuple[str, str, bool]:
    rows = []
    for row in measured:
        case = Case.from_json(row["case"])
        rows.append(
            _Row(case, _on_this(machine, case), statistics.median(row["seconds"]), row["bytes"])
        )
    errors = [abs(row.error) for row in rows]
    of_bytes = [abs(row.bytes_error) for row in rows]
    hits = total = 0
    for ranks, name in sorted({(row.case.layout.ranks, row.case.name) for row in rows}):
        some = [row for row in rows if (row.case.layout.ranks, row.case.name) == (ranks, name)]
        if len(some) > _FEW:
            best = min(some, key=lambda row: row.seconds)
            total += 1
            hits += best in sorted(some, key=lambda row: row.found.step_seconds)[:_FEW]
    words = (
        f"{len(rows)} layouts: the time of a step is off by {statistics.fmean(errors):.1%} on average and "
        f"{max(errors):.0%} at worst, the memory of a rank by {statistics.fmean(of_bytes):.1%} and "
        f"{max(of_bytes):.0%}. The fastest layout is among the three that are predicted to be in "
        f"{hits} of {total} groups of one model and number of ranks."
    )
    good = statistics.fmean(errors) <= _MEAN and max(errors) <= _WORST and hits == total
    return _times(rows), words, good and statistics.fmean(of_bytes) <= _MEMORY


def _limits(measured: Any, machine: Machine) -> tuple[str, str, bool]:
    lines, wrong, killed = [], 0, 0
    for row in measured:
        case = Case.from_json(row["case"])
        found = _on_this(machine, case)
        fits = found.memory.total * (1 + machine.memory_margin) <= row["limit"]
        wrong += fits and not row["lived"]
        killed += not row["lived_below"]
        lines.append(
            (
                case.name,
                case.layout.words(),
                f"{row['limit'] / _MIB:,.0f}",
                "fits" if fits else "does not fit",
                "trained" if row["lived"] else "out of memory",
                f"{row['below'] / _MIB:,.0f}",
                "trained" if row["lived_below"] else "out of memory",
            )
        )
    table = _table(lines, "model", "layout", "limit, MiB", "said", "and", "limit, MiB", "and")
    words = (
        f"{len(lines)} layouts at the least limit at which they are said to fit: {wrong} of these ended "
        f"out of memory. At 0.7 times the predicted bytes {killed} did."
    )
    return table, words, wrong == 0 and killed > 0


def _schedules(measured: Any, machine: Machine) -> tuple[str, str, bool]:
    lines, bubbles, steps = [], [], []
    for row in measured:
        chunks = row["chunks"]
        forward, inputs, weights = (each / chunks for each in row["costs"])
        stages = row["stages"] * chunks
        schedule = make_schedule(
            row["schedule"], row["stages"], row["microbatches"], chunks if chunks > 1 else None
        )
        ends, busy = play(
            schedule, [forward] * stages, [inputs + weights] * stages, [weights] * stages, 0.0
        )
        idle = 1 - sum(busy) / (row["stages"] * max(ends))
        bubbles.append(abs(idle - row["idle"]))
        steps.append(abs(max(ends) / row["seconds"] - 1))
        lines.append(
            (
                row["stages"],
                row["schedule"],
                row["microbatches"],
                f"{1e3 * max(ends):,.0f}",
                f"{1e3 * row['seconds']:,.0f}",
                f"{max(ends) / row['seconds'] - 1:+.1%}",
                f"{idle:.1%}",
                f"{row['idle']:.1%}",
            )
        )
    head = ("stages", "schedule", "micro-batches", "simulated, ms", "measured, ms", "off by")
    table = _table(lines, *head, "simulated bubble", "measured bubble")
    words = (
        f"The time of a step is off by {max(steps):.1%} at worst, the bubble by "
        f"{100 * max(bubbles):.1f} points."
    )
    return table, words, max(steps) <= _STEP and max(bubbles) <= _BUBBLE


def _overlap(machine: Machine, seconds: float, alone: float) -> float:
    """What share of the shorter of messages and backward pass a step of `LINK_CASE` hides.

    Args:
        machine: The machine, with the link.
        seconds: Of the step.
        alone: Of what a rank computes of it.
    """
    case, overlaps = LINK_CASE, (0.0, 1.0)
    none, all_hidden = (
        estimate(
            case.sizes, machine.replace(overlap=each), case.layout, global_batch=case.batch
        ).step_seconds
        for each in overlaps
    )
    own = estimate(case.sizes, machine, Layout(), global_batch=case.batch // case.layout.ranks)
    # Of the estimates only what the messages add is taken: that of a computation may be off by more.
    added = none - own.step_seconds
    return min(max((alone + added - seconds) / (none - all_hidden), 0.0), 1.0)


def _hosts(measured: Any, machine: Machine) -> tuple[str, str, bool]:
    texts, errors = [], []
    for row in measured:
        link = link_of(row["sizes"], row["messages"])
        # A message waits for the processor as it does inside of a host.
        link = Link(max(link.latency, machine.inside.latency), link.bandwidth)
        here = machine.replace(between=link, ranks_per_host=1)
        here = here.replace(overlap=_overlap(here, row["step"], row["alone"]))
        rows = []
        for each in row["rows"]:
            case = Case.from_json(each["case"])
            found = estimate(case.sizes, here, case.layout, global_batch=case.batch)
            rows.append(_Row(case, found, each["seconds"], each["bytes"]))
        errors += [abs(each.error) for each in rows]
        texts.append(
            f"{row['rate']}, measured as {1e6 * link.latency:.0f} us and "
            f"{1e-6 * link.bandwidth:.0f} MB/s, {here.overlap:.0%} hidden:\n\n{_times(rows)}"
        )
    words = (
        f"{len(errors)} layouts on two hosts: off by {statistics.fmean(errors):.1%} on average and "
        f"{max(errors):.0%} at worst."
    )
    good = statistics.fmean(errors) <= _MEAN and max(errors) <= _WORST
    return "\n\n".join(texts), words, good
