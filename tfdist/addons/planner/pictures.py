"""Plots of plans, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tfdist.addons.planner.choice import Plan
from tfdist.addons.planner.estimates import Estimate

_MEMORY = ("parameters", "gradients", "optimizer", "activations", "working", "buffers",
           "allocator", "process")  # fmt: skip
_SECONDS = ("compute", "tensor", "expert", "context", "bubble", "gradients", "optimizer", "other")
_MOST_BARS = 8


def save_picture(plan: Plan, path: str | Path) -> None:
    """Plot memory and time by kind of the best layouts, and time against memory of all kinds.

    Args:
        plan: A plan with at least one layout that fits.
        path: The file; its suffix determines the format.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: No layout fits, or matplotlib does not support the format.
    """
    from matplotlib.figure import Figure

    if not plan.best:
        raise ValueError(
            "A plot requires a plan with at least one layout that fits. Received: a plan without one."
        )
    shown = list(plan.best)
    shown += [each.estimate for each in plan.rejected if each.estimate is not None]
    bars = shown[:_MOST_BARS]
    figure = Figure(figsize=(13, 1.6 + 0.45 * len(bars) + 3.2), layout="constrained")
    memory, seconds, frontier = (
        figure.add_subplot(2, 2, 1),
        figure.add_subplot(2, 2, 2),
        figure.add_subplot(2, 1, 2),
    )
    names = [each.layout.words() for each in bars]
    _bars(
        memory,
        names,
        [{k: getattr(e.memory, k) / 2**30 for k in _MEMORY} for e in bars],
        "GiB per rank",
    )
    memory.axvline(bars[0].memory_limit / 2**30, color="black", linestyle=":")
    _bars(
        seconds, [""] * len(bars), [{k: e.seconds[k] for k in _SECONDS} for e in bars], "s per step"
    )
    _frontier(frontier, shown)
    figure.savefig(path)


def _bars(axes, names: Sequence[str], rows: Sequence[dict[str, float]], unit: str) -> None:
    """Plot a stacked bar for each row."""
    places = range(len(rows), 0, -1)
    left = [0.0] * len(rows)
    for kind in rows[0]:
        widths = [row[kind] for row in rows]
        if any(widths):
            axes.barh(places, widths, left=left, label=kind)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(list(places), names, fontsize=7)
    axes.set_xlabel(unit)
    axes.legend(fontsize=7)


def _frontier(axes, estimates: Sequence[Estimate]) -> None:
    """Plot time against memory, and a line through the Pareto-optimal layouts."""
    points = sorted((e.memory.total / 2**30, e.step_seconds, e.layout.kind) for e in estimates)
    axes.scatter([each[0] for each in points], [each[1] for each in points], s=16)
    best: list[tuple[float, float]] = []
    for size, time, kind in points:
        axes.annotate(kind, (size, time), fontsize=7, xytext=(3, 3), textcoords="offset points")
        if not best or time < best[-1][1]:
            best.append((size, time))
    axes.plot([each[0] for each in best], [each[1] for each in best], drawstyle="steps-post")
    axes.set_xlabel("GiB per rank")
    axes.set_ylabel("s per step")
    axes.set_yscale("log")
