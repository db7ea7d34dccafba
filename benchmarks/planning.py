"""Predictions of tfdist.planner beside what layouts take on this machine.

    python -m tfdist.benchmarks.planning --machine=machine.json [--ranks=2,4] [--table=docs/planning.md]

`tfdist-plan calibrate` writes the machine's file; none of the layouts here is among what it measures. The
layouts of a number of ranks are measured one after the other on one pool, several rounds, and each
has the median of its rounds. Exit code 1 where the mean or the worst error is above its limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys

from tabulate import tabulate

from tfdist.benchmarks.measuring import ENVIRONMENT, write_between
from tfdist.launch import trials
from tfdist.planner import Layout, Machine, Transformer, estimate
from tfdist.planner.calibration import read_machine
from tfdist.testing import RankPool

MARK = "benchmarks.planning: prediction"
MEAN_LIMIT, WORST_LIMIT = 0.10, 0.25
SMALL = Transformer(4, 192, 4, 512, 128)
LARGE = Transformer(6, 384, 6, 512, 128)
EXPERTS = Transformer(4, 192, 4, 512, 128, experts=4)


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout to measure.

    Attributes:
        name: The model, in words.
        sizes: The model.
        layout: The layout.
        batch: Samples of an update.
    """

    name: str
    sizes: Transformer
    layout: Layout
    batch: int


def cases(ranks: int) -> list[Case]:
    """The layouts that are measured on so many ranks."""
    n, batch = ranks, 8 * ranks
    found = [
        ("small", SMALL, Layout(data=n)),
        ("small", SMALL, Layout(data=n, zero_stage=1)),
        ("small", SMALL, Layout(data=n, zero_stage=3)),
        ("small", SMALL, Layout(data=n, accumulation=2)),
        ("small", SMALL, Layout(context=n)),
        ("small", SMALL, Layout(pipeline=n, num_microbatches=2 * n)),
        ("small", SMALL, Layout(pipeline=n, num_microbatches=4 * n, schedule="zero-bubble")),
        ("large", LARGE, Layout(data=n)),
        ("large", LARGE, Layout(data=n, zero_stage=2)),
        ("large", LARGE, Layout(data=n, recompute="every_layer")),
        ("large", LARGE, Layout(data=n // 2, tensor=2)),
        ("large", LARGE, Layout(data=n // 2, tensor=2, recompute="selective")),
        ("large", LARGE, Layout(data=n // 2, pipeline=2, num_microbatches=4)),
        ("large", LARGE, Layout(data=n // 2, pipeline=2, num_microbatches=8)),
        ("experts", EXPERTS, Layout(expert=n)),
    ]
    if n > 2:
        found += [
            ("large", LARGE, Layout(tensor=2, pipeline=2, data=n // 4, num_microbatches=4)),
            ("small", SMALL, Layout(context=2, data=n // 2)),
            ("experts", EXPERTS, Layout(expert=2, data=n // 2)),
        ]
    return [Case(name, sizes, layout, batch) for name, sizes, layout in found]


@dataclasses.dataclass
class Row:
    """A layout, predicted and measured."""

    ranks: int
    case: Case
    predicted: float
    measured: float
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        """How far the predicted time is off, as a share of the measured one."""
        return self.predicted / self.measured - 1

    @property
    def bytes_error(self) -> float:
        """The same of the bytes of a rank, process and all."""
        return self.predicted_bytes / self.measured_bytes - 1


def measure(machine: Machine, ranks: int, engine: str, rounds: int) -> list[Row]:
    """Measures the layouts of so many ranks."""
    machine = machine.replace(ranks_per_host=ranks)
    listed = cases(ranks)
    times: list[list[float]] = [[] for _ in listed]
    peaks: list[float] = [0.0] * len(listed)
    with RankPool(ranks, engine, environment=ENVIRONMENT) as pool:
        for _ in range(rounds):
            for place, case in enumerate(listed):
                found = pool.run(trials.trial, case.sizes, case.layout, case.batch, timeout=500)
                times[place].append(max(each.seconds for each in found))
                # A later round begins with what an earlier one has left.
                peaks[place] = peaks[place] or max(each.peak for each in found)
                print(
                    f"{ranks} ranks, {case.name}, {case.layout.words()}: "
                    f"{1e3 * times[place][-1]:.0f} ms",
                    file=sys.stderr,
                    flush=True,
                )
    rows = []
    for case, seconds, peak in zip(listed, times, peaks, strict=True):
        step = estimate(case.sizes, machine, case.layout, global_batch=case.batch)
        rows.append(
            Row(
                ranks,
                case,
                step.step_seconds,
                statistics.median(seconds),
                step.memory.total,
                step.memory.process + peak,
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    """The table of the document."""
    head = (
        *("ranks", "model", "layout", "predicted, ms", "measured, ms", "off by"),
        *("predicted, MiB", "measured, MiB", "off by"),
    )
    lines = [
        (
            row.ranks,
            row.case.name,
            row.case.layout.words(),
            f"{1e3 * row.predicted:,.0f}",
            f"{1e3 * row.measured:,.0f}",
            f"{row.error:+.0%}",
            f"{row.predicted_bytes / 2**20:,.0f}",
            f"{row.measured_bytes / 2**20:,.0f}",
            f"{row.bytes_error:+.0%}",
        )
        for row in rows
    ]
    return tabulate(lines, head, tablefmt="github", disable_numparse=True)


def verdict(rows: list[Row]) -> tuple[str, bool]:
    """The errors in words, and whether they are within their limits."""
    errors = [abs(row.error) for row in rows]
    of_bytes = [abs(row.bytes_error) for row in rows]
    hits = total = 0
    for ranks, name in sorted({(row.ranks, row.case.name) for row in rows}):
        some = [row for row in rows if (row.ranks, row.case.name) == (ranks, name)]
        if len(some) > 3:
            best = min(some, key=lambda row: row.measured)
            total += 1
            hits += best in sorted(some, key=lambda row: row.predicted)[:3]
    words = (
        f"{len(rows)} layouts: the time of a step is off by {statistics.fmean(errors):.0%} on average and "
        f"{max(errors):.0%} at worst, the memory of a rank by {statistics.fmean(of_bytes):.0%} and "
        f"{max(of_bytes):.0%}. The fastest layout is among the three that are predicted to be in "
        f"{hits} of {total} groups of one model and number of ranks."
    )
    good = statistics.fmean(errors) <= MEAN_LIMIT and max(errors) <= WORST_LIMIT and hits == total
    return words, good and statistics.fmean(of_bytes) <= MEAN_LIMIT


def main() -> int:
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--machine", required=True, help="File of `tfdist-plan calibrate`.")
    flags.add_argument("--engine", choices=["horovod", "tensorflow"], default="horovod")
    flags.add_argument("--ranks", default="2,4", help="Numbers of ranks, with commas.")
    flags.add_argument("--rounds", type=int, default=3)
    flags.add_argument("--json", help="Where to write the measurements.")
    flags.add_argument("--table", help="A document to write the table to.")
    options = flags.parse_args()
    machine = read_machine(options.machine)
    rows: list[Row] = []
    for ranks in map(int, options.ranks.split(",")):
        rows += measure(machine, ranks, options.engine, options.rounds)
    words, good = verdict(rows)
    print(f"{table(rows)}\n\n{words}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([dataclasses.asdict(row) for row in rows], file, indent=1)
    if options.table:
        write_between(options.table, MARK, f"{table(rows)}\n\n{words}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
