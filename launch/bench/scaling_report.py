"""Results of `tfdist-bench scaling`: efficiencies, fitted laws, tables, JSON and a plot.

Strong scaling splits the same work over N ranks: the speed-up is T1 / TN, the efficiency T1 / (N TN) (Amdahl
1967). Weak scaling gives each rank the same work: the speed-up is N T1 / TN, the efficiency T1 / TN
(Gustafson 1988). The smallest job is the baseline, also if it has several ranks.
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
    """The measurements of the slowest rank of a job.

    Attributes:
        seconds: Median seconds of a step.
        rows: Rows of a step over all ranks; 0 if unknown.
        communication: The share of a step for exposed communication; None if unknown.
        predicted: Seconds of a step predicted by the planner; None without a prediction.
        unpredicted: The reason why there is no prediction.
        flops: Fitted FLOP/s of one rank.
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
        weak: Whether the work grows with the number of ranks.
        jobs: The jobs of all rounds by number of ranks, in ascending order.
        crowded: The numbers of ranks that share cores, which are excluded from fits.
    """

    weak: bool
    jobs: Mapping[int, Sequence[Job]]
    crowded: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        """Name of the curve: `strong` or `weak`."""
        return "weak" if self.weak else "strong"

    @property
    def base(self) -> int:
        """Smallest number of ranks, the baseline."""
        return min(self.jobs)

    def seconds(self, ranks: int) -> float:
        """Median seconds of a step over rounds."""
        return statistics.median(job.seconds for job in self.jobs[ranks])

    def rows(self, ranks: int) -> int:
        """Rows of a step."""
        return self.jobs[ranks][0].rows

    def efficiencies(self, ranks: int) -> list[float]:
        """The efficiency in each round, compared with the baseline of the same round."""
        pairs = zip(self.jobs[self.base], self.jobs[ranks], strict=True)
        return [self._efficiency(one.seconds, many.seconds, ranks) for one, many in pairs]

    def predicted(self, ranks: int) -> float | None:
        """The efficiency predicted by the planner."""
        one, many = (self.jobs[each][0].predicted for each in (self.base, ranks))
        return None if one is None or many is None else self._efficiency(one, many, ranks)

    def _efficiency(self, one: float, many: float, ranks: int) -> float:
        # Normalized to one rank, because the baseline may have several.
        whole = one if self.weak else one * self.base
        return laws.parallel_efficiency(whole, many, ranks, weak=self.weak)

    def serial(self) -> laws.Range | None:
        """The serial share, without crowded jobs; None for fewer than two jobs or without one rank."""
        ranks = [each for each in self.jobs if each not in self.crowded]
        if 1 not in ranks or len(ranks) < 2:
            return None
        seconds = [self.seconds(each) for each in ranks]
        return laws.serial_share(ranks, seconds, weak=self.weak)

    def law(self) -> str:
        """A one-line summary of the fitted law; "" for too few jobs."""
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
            return f"{text}: above 100%, because more ranks do less in the same time."
        if share.value < 0:
            return f"{text}: below 0%, because the speed-up is superlinear."
        return f"{text}."

    def table(self) -> str:
        """The table and the fitted law, as text."""
        base = "1 rank" if self.base == 1 else f"{self.base} ranks"
        work = "the same rows per rank" if self.weak else "the same rows per update"
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
            "over rounds",
            "communication",
            "planned speed-up",
            "planned efficiency",
        )
        table = tabulate(lines, heads, disable_numparse=True, colalign=("right",) * len(heads))
        parts = [f"{self.name.capitalize()} scaling: {work}, compared with {base}", table]
        if self.crowded & self.jobs.keys():
            parts.append("* more threads than cores: excluded from fits.")
        reasons = {job.unpredicted for each in self.jobs.values() for job in each} - {""}
        parts += [f"No prediction: {reason}" for reason in sorted(reasons)]
        return "\n".join([*parts, *filter(None, [self.law()])])

    def as_json(self) -> dict[str, Any]:
        """The results as JSON, with the measurements of each job."""
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
    """Plot measured, predicted and ideal speed-up and efficiency over ranks.

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
