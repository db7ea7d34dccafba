"""What `python -m benchmarks.training` has found: as JSON, as a table and as a picture."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

_MIB = 1 << 20
_TIMES = (
    "",
    "this / other",
    "this, ms",
    "other, ms",
    "ratio",
    "spread",
    "at most",
    "this, of peak",
    "other, of peak",
)
_USED = (
    "a rank at most",
    "this, MiB",
    "other, MiB",
    "this, growth, MiB",
    "other, growth, MiB",
    "this, processor, ms",
    "other, processor, ms",
)


@dataclasses.dataclass(frozen=True)
class Side:
    """One job of a comparison.

    Attributes:
        title: What it is called.
        versions: Of what it ran on.
        seconds: By round, the median time of a step on the slowest rank.
        processor: By round, the processor time of a step on the rank that uses most.
        imported: The bytes that a rank's process had before it built anything.
        peak: The most bytes that a rank's process had (VmHWM).
        first_loss: The mean loss of the first steps; None where nothing is trained.
        last_loss: That of the last round.
        trained: How many parameters are trained; None in findings of before this was noted.
    """

    title: str
    versions: str
    seconds: list[float]
    processor: list[float]
    imported: int
    peak: int
    first_loss: float | None
    last_loss: float | None
    trained: int | None = None

    @property
    def growth(self) -> int:
        """What training has added to the process."""
        return self.peak - self.imported


@dataclasses.dataclass(frozen=True)
class Finding:
    """A comparison, measured.

    Attributes:
        name: Of the comparison.
        ours: The side whose time is divided.
        theirs: The side that it is divided by.
        limit: The most that the ratio may be.
        parameters: How many the model has.
        machine: What it ran on.
        day: When.
        flops: The floating-point operations of the model's products in a step; None where not counted.
        gemm_peak: The most that products of large matrices reach on as many threads, in FLOP/s.
    """

    name: str
    ours: Side
    theirs: Side
    limit: float
    parameters: int
    machine: str
    day: str
    flops: float | None = None
    gemm_peak: float | None = None

    def share_of_peak(self, side: Side) -> float | None:
        """What a side reaches of the peak of products; None where that was not measured."""
        if self.flops is None or self.gemm_peak is None:
            return None
        return self.flops / statistics.median(side.seconds) / self.gemm_peak

    @property
    def ratios(self) -> list[float]:
        """Ours over theirs, by round."""
        return [a / b for a, b in zip(self.ours.seconds, self.theirs.seconds, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def is_over(self) -> bool:
        """Whether the ratio is above its limit."""
        return self.ratio > self.limit

    def row(self) -> str:
        """A line for the terminal."""
        ours, theirs = (1e3 * statistics.median(side.seconds) for side in (self.ours, self.theirs))
        return (
            f"{self.name:<28} {ours:9.1f} ms {theirs:9.1f} ms   {self.ratio:5.3f}  "
            f"[{min(self.ratios):5.3f}, {max(self.ratios):5.3f}]  at most {self.limit:g};  "
            f"{self.ours.peak / _MIB:,.0f} and {self.theirs.peak / _MIB:,.0f} MiB"
        )


def read(path: Path) -> dict[str, Finding]:
    """Findings by name; none where there is no file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It holds something else.
    """
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())["findings"]
        return {line["name"]: _from_json(line) for line in found}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of findings of this program.") from error


def write(path: Path, findings: Sequence[Finding]) -> None:
    """Writes findings, with what is read off them."""
    lines = []
    for finding in findings:
        spread = [min(finding.ratios), max(finding.ratios)]
        lines.append({**dataclasses.asdict(finding), "ratio": finding.ratio, "spread": spread})
    path.write_text(json.dumps({"findings": lines}, indent=1) + "\n")


def table(findings: Sequence[Finding]) -> str:
    """Two tables in Markdown, of times and of what a rank uses; what is above its limit is bold."""
    times, used = [], []
    for finding in findings:
        ours, theirs = finding.ours, finding.theirs
        times.append(
            (
                f"`{finding.name}`",
                f"{ours.title} / {theirs.title}",
                f"{1e3 * statistics.median(ours.seconds):.1f}",
                f"{1e3 * statistics.median(theirs.seconds):.1f}",
                _marked(f"{finding.ratio:.2f}", finding.is_over),
                f"{min(finding.ratios):.2f} to {max(finding.ratios):.2f}",
                f"{finding.limit:.2f}",
                *(_percent(finding.share_of_peak(side)) for side in (ours, theirs)),
            )
        )
        used.append(
            (
                f"`{finding.name}`",
                _marked(f"{ours.peak / _MIB:,.0f}", ours.peak > theirs.peak),
                f"{theirs.peak / _MIB:,.0f}",
                f"{ours.growth / _MIB:,.0f}",
                f"{theirs.growth / _MIB:,.0f}",
                f"{1e3 * statistics.median(ours.processor):.1f}",
                f"{1e3 * statistics.median(theirs.processor):.1f}",
            )
        )
    machines = sorted({finding.machine for finding in findings})
    versions = sorted({side.versions for finding in findings for side in _sides(finding)})
    days = sorted({finding.day for finding in findings})
    head: Sequence[str] = _TIMES
    of_peak = ""
    peaks = [each.gemm_peak for each in findings if each.flops and each.gemm_peak]
    if peaks:
        low, high = (f"{peak / 1e9:.0f}" for peak in (min(peaks), max(peaks)))
        of_peak = (
            " Of peak: the model's FLOPs a second over what TensorFlow's products of large matrices "
            f"reached on as many threads, {' to '.join(dict.fromkeys((low, high)))} GFLOP/s."
        )
    else:
        head, times = head[:-2], [row[:-2] for row in times]
    return "\n\n".join(
        [
            _markdown(head, times, texts=2),
            _markdown(_USED, used, texts=1),
            f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))}, on "
            f"{' and '.join(machines)}; {'; '.join(versions)}.{of_peak}",
        ]
    )


def picture(path: Path, findings: Sequence[Finding]) -> None:
    """Draws a bar for each comparison: how many times as fast tfdist is, longer is better.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    rows = sorted(findings, key=lambda finding: finding.ratio, reverse=True)
    figure = Figure(figsize=(9, 0.45 * len(rows) + 1.0), layout="constrained")
    axes = figure.subplots()
    speeds = [1 / row.ratio for row in rows]
    slower = [1 / row.ratio - 1 / max(row.ratios) for row in rows]
    faster = [1 / min(row.ratios) - 1 / row.ratio for row in rows]
    bars = axes.barh([_bar_label(row) for row in rows], speeds, xerr=[slower, faster])
    axes.bar_label(bars, [f"{speed:.2f}x" for speed in speeds], padding=4)
    axes.axvline(1.0, color="black", linestyle="--", linewidth=1)
    axes.set_xlim(0.0, 1.2 * max(speeds))
    axes.margins(y=0.01)
    axes.set_xlabel("steps per second over the other's (dashed: equally fast)")
    figure.savefig(path, dpi=150)


def _bar_label(finding: Finding) -> str:
    model = "GPT" if finding.name.startswith("gpt") else "ConvNet"
    return f"{model}, {finding.ours.title}\nbeside {finding.theirs.title}"


def _from_json(line: dict[str, Any]) -> Finding:
    names = {field.name for field in dataclasses.fields(Finding)}
    values = {name: value for name, value in line.items() if name in names}
    sides = {name: Side(**values[name]) for name in ("ours", "theirs")}
    return Finding(**{**values, **sides})


def _sides(finding: Finding) -> tuple[Side, Side]:
    return finding.ours, finding.theirs


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _marked(text: str, is_over: bool) -> str:
    return f"**{text}**" if is_over else text


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> str:
    """A table whose first columns are words and whose others are figures."""
    sides = ("left",) * texts + ("right",) * (len(head) - texts)
    return tabulate(rows, head, tablefmt="pipe", disable_numparse=True, colalign=sides)
