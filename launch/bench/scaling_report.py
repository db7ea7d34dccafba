"""What `tfdist-bench scaling` found: efficiencies, the laws that fit, tables, JSON and a picture.

Strong scaling divides the same work among N ranks: the speed-up is T1 / TN, the efficiency T1 / (N TN) (Amdahl
1967). Weak scaling gives each rank the same work: the speed-up is N T1 / TN, the efficiency T1 / TN
(Gustafson 1988). Where the smallest job has several ranks, it stands in for one.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from tfdist.addons.planner import laws


@dataclasses.dataclass(frozen=True)
class Job:
    """What the ranks of one job measured, the slowest of them.

    Attributes:
        seconds: The median time of a step.
        rows: Rows of a step over all ranks; 0 where the steps do not say.
        communication: The share of a step in which ranks wait for each other; None if it is not known.
        predicted: Seconds of a step by the planner; None if it has no prediction.
        unpredicted: Why it has none.
        flops: FLOP/s that one rank was found to reach.
    """

    seconds: float
    rows: int
    communication: float | None = None
    predicted: float | None = None
    unpredicted: str = ""
    flops: float | None = None


@dataclasses.dataclass(frozen=True)
class Curve:
    """Strong or weak scaling.

    Attributes:
        weak: Whether each rank has as much work as the one.
        jobs: By number of ranks the jobs of all rounds; the smallest number comes first.
        crowded: The numbers of ranks that share cores; they are not in fits.
    """

    weak: bool
    jobs: Mapping[int, Sequence[Job]]
    crowded: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """What it is called: `strong` or `weak`."""
        return "weak" if self.weak else "strong"

    @property
    def base(self) -> int:
        """The smallest number of ranks."""
        return min(self.jobs)

    def seconds(self, ranks: int) -> float:
        """The median time of a step over rounds."""
        return statistics.median(job.seconds for job in self.jobs[ranks])

    def rows(self, ranks: int) -> int:
        """Rows of a step."""
        return self.jobs[ranks][0].rows

    def efficiencies(self, ranks: int) -> list[float]:
        """By round, the efficiency beside the base of the same round."""
        pairs = zip(self.jobs[self.base], self.jobs[ranks], strict=True)
        return [self._efficiency(one.seconds, many.seconds, ranks) for one, many in pairs]

    def predicted(self, ranks: int) -> float | None:
        """The efficiency by the planner's seconds."""
        one, many = (self.jobs[each][0].predicted for each in (self.base, ranks))
        return None if one is None or many is None else self._efficiency(one, many, ranks)

    def _efficiency(self, one: float, many: float, ranks: int) -> float:
        # Ideal ranks take the base's seconds for its work a rank, however many make the base.
        whole = one if self.weak else one * self.base
        return laws.parallel_efficiency(whole, many, ranks, weak=self.weak)

    def serial(self) -> laws.Range | None:
        """The serial share of the ranks that have cores of their own; None for fewer than two jobs."""
        ranks = [each for each in self.jobs if each not in self.crowded]
        if 1 not in ranks or len(ranks) < 2:
            return None
        seconds = [self.seconds(each) for each in ranks]
        return laws.serial_share(ranks, seconds, weak=self.weak)

    def law(self) -> str:
        """What the law of this kind of scaling says, in a line; "" for too few jobs."""
        share = self.serial()
        if share is None:
            return ""
        name = "Gustafson's law" if self.weak else "Amdahl's law"
        fitted = [each for each in self.jobs if each not in self.crowded]
        if len(fitted) == 2:
            text = f"{name}, solved for 1 and {max(fitted)} ranks: serial share {share.value:.1%}"
        else:
            text = (
                f"{name}, fitted to {len(fitted)} numbers of ranks: serial share {share.value:.1%} "
                f"(95%: {share.low:.1%} to {share.high:.1%})"
            )
        if share.value > 1:
            return f"{text}: more than all of it, since more ranks do less in the same time."
        if share.value < 0:
            return f"{text}: less than nothing, since ranks do more together than each alone."
        return f"{text}."

    def table(self) -> str:
        """The table, and the law under it."""
        base = "1 rank" if self.base == 1 else f"{self.base} ranks"
        work = "the same rows a rank" if self.weak else "the same rows an update"
        lines = []
        for ranks, jobs in self.jobs.items():
            found = self.efficiencies(ranks)
            efficiency, predicted = statistics.median(found), self.predicted(ranks)
            shares = [each.communication for each in jobs if each.communication is not None]
            lines.append(
                (
                    f"{ranks}{' *' if ranks in self.crowded else ''}",
                    self.rows(ranks) or "-",
                    f"{1e3 * self.seconds(ranks):.2f}",
                    f"{efficiency * ranks / self.base:.2f}",
                    f"{efficiency:.1%}",
                    f"{min(found):.1%} to {max(found):.1%}",
                    f"{statistics.median(shares):.1%}" if shares else "-",
                    "-" if predicted is None else f"{predicted * ranks / self.base:.2f}",
                    "-" if predicted is None else f"{predicted:.1%}",
                )
            )
        heads = (
            "ranks",
            "rows",
            "step, ms",
            "speed-up",
            "efficiency",
            "of the rounds",
            "communication",
            "planned speed-up",
            "planned efficiency",
        )
        table = tabulate(lines, heads, disable_numparse=True, colalign=("right",) * len(heads))
        parts = [f"{self.name.capitalize()} scaling: {work}, beside {base}", table]
        if self.crowded & self.jobs.keys():
            parts.append("* more threads than cores: not in fits.")
        reasons = {job.unpredicted for each in self.jobs.values() for job in each} - {""}
        parts += [f"No prediction: {reason}" for reason in sorted(reasons)]
        return "\n".join([*parts, *filter(None, [self.law()])])

    def as_json(self) -> dict[str, Any]:
        """The same, with what each job measured."""
        share = self.serial()
        return {
            "base": self.base,
            "serial_share": None if share is None else share.value,
            "ranks": {
                str(ranks): {
                    "step_seconds": self.seconds(ranks),
                    "speed_up": statistics.median(self.efficiencies(ranks)) * ranks / self.base,
                    "efficiency": statistics.median(self.efficiencies(ranks)),
                    "efficiencies": self.efficiencies(ranks),
                    "predicted_efficiency": self.predicted(ranks),
                    "crowded": ranks in self.crowded,
                    "jobs": [dataclasses.asdict(job) for job in jobs],
                }
                for ranks, jobs in self.jobs.items()
            },
        }


def picture(path: Path, curves: Sequence[Curve]) -> None:
    """Draws speed-up and efficiency over ranks, measured, planned and ideal.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    speed, efficiency = figure.subplots(1, 2)
    for color, curve in zip(("tab:blue", "tab:orange"), curves, strict=False):
        ranks = np.array(list(curve.jobs))
        rounds = np.array([curve.efficiencies(each) for each in curve.jobs])
        planned = [curve.predicted(each) for each in curve.jobs]
        for axes, factors in ((speed, ranks / curve.base), (efficiency, np.ones(len(ranks)))):
            found = factors[:, None] * rounds
            middle = np.median(found, axis=1)
            axes.errorbar(
                ranks,
                middle,
                [middle - found.min(axis=1), found.max(axis=1) - middle],
                marker="o",
                capsize=3,
                color=color,
                label=f"{curve.name}, measured",
            )
            if None not in planned:
                label = f"{curve.name}, planned"
                axes.plot(ranks, factors * np.array(planned), "--", color=color, label=label)
    every = sorted({each for curve in curves for each in curve.jobs})
    speed.plot(every, [each / every[0] for each in every], ":", color="gray", label="ideal")
    efficiency.axhline(1.0, linestyle=":", color="gray")
    for axes, label in ((speed, "speed-up"), (efficiency, "efficiency")):
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
        axes.set_xticks(every)
        axes.set_ylim(bottom=0)
    speed.legend()
    figure.savefig(path)
