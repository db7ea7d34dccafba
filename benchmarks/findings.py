"""What `tfdist-bench training` has found: as JSON, as a table and as a picture."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

__all__ = ["Finding", "Side", "picture", "read", "table", "write"]

_MIB = 1 << 20
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
        first_loss: The mean loss of the first steps.
        last_loss: That of the last round.
    """

    title: str
    versions: str
    seconds: list[float]
    processor: list[float]
    imported: int
    peak: int
    first_loss: float
    last_loss: float

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
    """

    name: str
    ours: Side
    theirs: Side
    limit: float
    parameters: int
    machine: str
    day: str

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
        raise ValueError(f"{path} holds no findings of this program.") from error


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
    return "\n\n".join(
        [
            _markdown(
                ("", "this / other", "this, ms", "other, ms", "ratio", "spread", "at most"),
                times,
                texts=2,
            ),
            _markdown(_USED, used, texts=1),
            f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))}, on "
            f"{' and '.join(machines)}; {'; '.join(versions)}.",
        ]
    )


def picture(path: Path, findings: Sequence[Finding]) -> None:
    """Draws the ratios, their spread and their limits; the suffix says in which format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.35 * len(findings) + 1.4), layout="constrained")
    axes = figure.subplots()
    for row, finding in enumerate(reversed(findings)):
        color = "tab:red" if finding.is_over else "tab:blue"
        axes.plot([min(finding.ratios), max(finding.ratios)], [row, row], color=color, linewidth=1)
        axes.plot(finding.ratio, row, "o", color=color)
        axes.plot(finding.limit, row, "|", color="black", markersize=14)
    axes.set_yticks(range(len(findings)), [finding.name for finding in reversed(findings)])
    axes.axvline(1.0, color="lightgray", zorder=0)
    axes.set_xlim(left=0.0)
    axes.set_xlabel("time of a step over that of the other; the stroke is the limit")
    figure.savefig(path, dpi=150)


def _from_json(line: dict[str, Any]) -> Finding:
    names = {field.name for field in dataclasses.fields(Finding)}
    values = {name: value for name, value in line.items() if name in names}
    sides = {name: Side(**values[name]) for name in ("ours", "theirs")}
    return Finding(**{**values, **sides})


def _sides(finding: Finding) -> tuple[Side, Side]:
    return finding.ours, finding.theirs


def _marked(text: str, is_over: bool) -> str:
    return f"**{text}**" if is_over else text


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> str:
    """A table whose first columns are words and whose others are figures."""
    sides = ("left",) * texts + ("right",) * (len(head) - texts)
    return tabulate(rows, head, tablefmt="pipe", disable_numparse=True, colalign=sides)
