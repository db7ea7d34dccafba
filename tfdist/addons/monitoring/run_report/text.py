"""A report of a training as text."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from tfdist.addons.monitoring.monitor.words import big, milliseconds
from tfdist.addons.monitoring.run_report.reading import RankTimes, Run


def section_names(times: Sequence[RankTimes]) -> list[str]:
    """The sections of a trace, sorted by their time, the longest first."""
    names = {name for each in times for name in each.sections}
    return sorted(names, key=lambda name: -sum(each.sections.get(name, 0.0) for each in times))


def slowest(times: Sequence[RankTimes]) -> list[tuple[RankTimes, float]]:
    """The ranks by their work, the longest first, each with its score relative to the fastest."""
    least = min((each.work for each in times), default=0.0)
    found = sorted(times, key=lambda each: -each.work)
    return [(each, least / each.work if each.work else 1.0) for each in found]


def rank_rows(times: Sequence[RankTimes]) -> tuple[list[str], list[list[str]]]:
    """A head and a row per rank: the fraction of the steps in each section."""
    names = section_names(times)
    head = ["rank", "steps", *(name.replace("_", " ") for name in names), "overlap"]
    rows = []
    for each in times:
        shares = [each.sections.get(name, 0.0) / each.steps if each.steps else 0 for name in names]
        rows.append(
            [
                each.name,
                milliseconds(each.steps),
                *(f"{share:.1%}" for share in shares),
                f"{each.overlap:.1%}",
            ]
        )
    return head, rows


def figures(run: Run) -> list[tuple[str, str]]:
    """The figures of the last report."""
    reports = run.intervals or run.epochs
    if not reports:
        return []
    logs, found = reports[-1]["logs"], [("steps", f"{reports[-1]['step']:,}")]
    forms = {
        "step_seconds": milliseconds,
        "samples_per_second": lambda value: f"{value:,.0f}",
        "tokens_per_second": lambda value: f"{value:,.0f}",
        "model_flops_per_second": big,
        "mfu": lambda value: f"{value:.1%}",
        "communication_hidden": lambda value: f"{value:.1%}",
        "imbalance": lambda value: f"{value:.1%}",
        "peak_memory": lambda value: f"{value / (1 << 20):,.0f} MiB",
        "loss": lambda value: f"{value:.4g}",
    }
    for name, form in forms.items():
        if name in logs:
            found.append((name.replace("_", " "), form(logs[name])))
    return found


def text_report(run: Run) -> str:
    """The contents of a page without its pictures."""
    parts = [f"Training: {run.title}"]
    if found := figures(run):
        parts.append("Last report\n" + tabulate(found, tablefmt="plain", disable_numparse=True))
    reports = run.intervals or run.epochs
    if reports and (sections := reports[-1]["sections"]):
        rows = [
            [name.replace("_", " "), f"{share:.1%}"]
            for name, share in sorted(sections.items(), key=lambda each: -each[1])
        ]
        parts.append("Sections of a step, all ranks\n" + tabulate(rows, tablefmt="plain"))
    if run.slices:
        times = run.rank_times()
        head, rows = rank_rows(times)
        parts.append("Traced steps\n" + tabulate(rows, head, tablefmt="plain"))
        if len(times) > 1:
            lines = [
                f"{each.name}: works {milliseconds(each.work)}, score {score:.2f}"
                for each, score in slowest(times)
            ]
            parts.append("Slowest ranks first\n" + "\n".join(lines))
    return "\n\n".join(parts)
