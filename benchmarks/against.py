"""`python -m benchmarks.training --against=COMMIT`: two trees of tfdist in turns, and what a change did to steps.

A ratio is that of one round: the median step of the checkout's turn over that of the commit's. That of the
processor time of a step stands beside it: what else runs on the machine changes it less, but it does not see
how long ranks wait. Intervals are those of order statistics: they hold the median with at least the
probability that is named, whatever the distribution. All rows together are one more row, whose ratio in a
round is the geometric mean of theirs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.commits import Tree
from benchmarks.comparisons import ROWS, SIZES, Job
from benchmarks.jobs import Block, JobError
from benchmarks.turns import take_turns

_CONFIDENCE = 0.95
#: How often both jobs of a row are started. Where memory and threads of a process lie by chance, steps of the same
#: program differ by some percent for as long as it lives.
_STARTS = 3
_COLUMNS = f"{'':<22} {'new':>12} {'old':>12}   new / old                  processor, new / old"


@dataclasses.dataclass(frozen=True)
class Interval:
    """Where a median lies.

    Attributes:
        low: The lower end.
        high: The upper end.
        confidence: With which probability, at least.
    """

    low: float
    high: float
    confidence: float


def interval_of_median(values: Sequence[float]) -> Interval:
    """The narrowest interval of order statistics that holds the median with 95% or more.

    How many of n values lie below the median is binomial: it is between the k-th smallest and the k-th
    largest unless fewer than k values are on one side. Fewer than 6 values reach 95% nowhere; theirs is
    from the smallest to the largest.
    """
    ordered, count = sorted(values), len(values)
    beyond, tail, rank = 0.0, 0.5**count, 0
    while rank < (count + 1) // 2 and (rank == 0 or 1.0 - 2.0 * (beyond + tail) >= _CONFIDENCE):
        beyond += tail
        rank += 1
        tail = math.comb(count, rank) * 0.5**count
    return Interval(ordered[rank - 1], ordered[count - rank], 1.0 - 2.0 * beyond)


def header(rounds: int) -> str:
    """What stands above the lines of rows."""
    confidence = interval_of_median(range(rounds)).confidence
    return (
        f"Medians of {rounds} rounds, with intervals of {confidence:.1%} by order statistics.\n"
        f"{_COLUMNS}"
    )


@dataclasses.dataclass(frozen=True)
class Row:
    """A row, measured.

    Attributes:
        name: What `--only` calls it.
        ratios: By round, the time of a step of the checkout over that of the commit.
        processor: The same of the processor time of a step, on the rank that uses most.
        new: By round, the median time of a step of the checkout, on the slowest rank; empty for all
            rows together.
        old: That of the commit.
    """

    name: str
    ratios: list[float]
    processor: list[float]
    new: list[float] = dataclasses.field(default_factory=list)
    old: list[float] = dataclasses.field(default_factory=list)

    def line(self) -> str:
        """For the terminal."""
        times = "".join(
            f" {1e3 * statistics.median(side):9.2f} ms" if side else " " * 13
            for side in (self.new, self.old)
        )
        ratios = "".join(f"   {_with_interval(each):<24}" for each in (self.ratios, self.processor))
        return f"{self.name:<22}{times}{ratios}".rstrip()


def _with_interval(ratios: Sequence[float]) -> str:
    found = interval_of_median(ratios)
    return f"{statistics.median(ratios):.3f} [{found.low:.3f}, {found.high:.3f}]"


def all_rows(rows: Sequence[Row]) -> Row:
    """The geometric mean of the ratios of rows, by round."""

    def means(ratios: Iterable[list[float]]) -> list[float]:
        return [statistics.geometric_mean(each) for each in zip(*ratios, strict=True)]

    return Row(
        "geometric mean", means(row.ratios for row in rows), means(row.processor for row in rows)
    )


def measure(
    name: str,
    new: Tree,
    old: Tree,
    *,
    sizes: str,
    peers: Path,
    rounds: int,
    steps: int | None,
    timeout: float,
    variables: dict[str, str],
) -> Row:
    """Measures one of `ROWS` on two trees.

    Args:
        name: Which.
        new: The tree whose time is divided.
        old: The tree that it is divided by.
        sizes: Which of `SIZES`.
        peers: The folder of the environments that `make peers` makes.
        rounds: How many turns each tree has.
        steps: How many steps a turn has; None for those of about two seconds.
        timeout: How long a start or a turn may take, in seconds.
        variables: Of the environments of both.

    Raises:
        JobError: A job failed or has imported another tree, their models differ in size, or one does
            not learn.
    """
    model, job = ROWS[name]
    pairs: list[tuple[Block, Block]] = []
    for start in range(min(_STARTS, rounds)):
        trees = [new, old] if start % 2 == 0 else [old, new]
        jobs, blocks = take_turns(
            [_of_tree(job, tree, variables) for tree in trees],
            model,
            SIZES[sizes][model],
            peers,
            rounds=(rounds - len(pairs)) // (min(_STARTS, rounds) - start),
            steps=steps,
            timeout=timeout,
        )
        for tree, running in zip(trees, jobs, strict=True):
            if running.packages != {str(tree.folder / "tfdist" / "__init__.py")}:
                raise JobError(
                    f"Ranks of {tree.folder} must import its packages. Received: {running.packages}."
                )
        own, other = (blocks[trees.index(tree)][1:] for tree in (new, old))
        pairs += zip(own, other, strict=True)
    return Row(
        name,
        ratios=[a.seconds / b.seconds for a, b in pairs],
        processor=[a.processor / b.processor for a, b in pairs],
        new=[block.seconds for block, _ in pairs],
        old=[block.seconds for _, block in pairs],
    )


def _of_tree(job: Job, tree: Tree, variables: dict[str, str]) -> Job:
    """The job on a tree: what a rank imports of tfdist comes from there."""
    return dataclasses.replace(
        job,
        title=f"{job.title}, {tree.commit}",
        variables={**job.variables, **variables, "PYTHONPATH": str(tree.folder)},
    )


def write(path: Path, new: Tree, old: Tree, machine: str, day: str, rows: Sequence[Row]) -> None:
    """Writes rows, and all of them together, as JSON."""
    lines = [
        {
            **dataclasses.asdict(row),
            "ratio": _summary(row.ratios),
            "processor_ratio": _summary(row.processor),
        }
        for row in [*rows, all_rows(rows)]
    ]
    trees = {
        name: {"commit": tree.commit, "folder": str(tree.folder)}
        for name, tree in (("new", new), ("old", old))
    }
    found = {**trees, "machine": machine, "day": day, "rows": lines}
    path.write_text(json.dumps(found, indent=1) + "\n")


def _summary(ratios: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), **dataclasses.asdict(interval_of_median(ratios))}
