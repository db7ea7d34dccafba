"""Timelines of a schedule, as text and as files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tfdist.pipeline.schedules import Action, Schedule
from tfdist.pipeline.simulation import UNIT_COSTS, Run, simulate
from tfdist.utils import checks

_COLORS = {
    Action.FORWARD: "#5b8def",
    Action.BACKWARD: "#f2a65a",
    Action.WEIGHT: "#7bc47f",
}
_MEANINGS = {
    Action.FORWARD: "forward",
    Action.BACKWARD: "backward",
    Action.WEIGHT: "weight gradient",
}


def as_text(schedule: Schedule) -> str:
    """A text with a row for each rank and a column for each unit of time.

    Forwards and backwards last one unit each, as do gradients of weights where the schedule separates
    them; a dot is a unit in which the rank waits. Several stages on a rank are distinguished by
    letters: `F3b` is the forward of micro-batch 3 on the rank's second stage.
    """
    costs = dict(UNIT_COSTS)
    if not schedule.splits_backward:
        costs[Action.WEIGHT] = 0.0
    # A rank's stages share its layers; here each of them takes whole columns.
    costs = {kind: cost * schedule.chunks for kind, cost in costs.items()}
    run = simulate(schedule, costs)
    units = round(run.span)
    rows = []
    for actions, times in zip(schedule.actions, run.times, strict=True):
        row = ["."] * units
        for action, (begin, _) in zip(actions, times, strict=True):
            row[round(begin)] = _cell(action, schedule)
        rows.append(row)
    width = max(len(cell) for row in rows for cell in row)
    label = len(f"rank {schedule.num_ranks - 1}")
    lines = [
        f"{'clock':<{label}}  " + " ".join(f"{unit:>{width}}" for unit in range(units)),
        *(
            f"{f'rank {rank}':<{label}}  " + " ".join(f"{cell:>{width}}" for cell in row)
            for rank, row in enumerate(rows)
        ),
    ]
    return "\n".join(line.rstrip() for line in lines)


def save_timeline(run: Run, path: str | Path) -> None:
    """Writes the timeline of a pipeline step: the actions of each rank and their times.

    Args:
        run: The step, as `PipelineModel.last_run` returns it.
        path: A file *.json, for a trace that Chrome and Perfetto show; any other suffix is that of a
            picture, which requires `pip install 'tfdist[plots]'`.

    Raises:
        TypeError: `run` is not a run.
        ValueError: `path` is not a path.
        ImportError: matplotlib, for a picture, is not installed.
    """
    checks.instance("run", run, Run, "a run, such as PipelineModel.last_run")
    if Path(checks.path("path", path)).suffix == ".json":
        write_chrome_trace(run, path)
    else:
        save_picture(run, path)


def save_picture(run: Run, path: str | Path, title: str | None = None) -> None:
    """Draws a run, simulated or measured, with matplotlib; the suffix determines the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    schedule = run.schedule
    figure = Figure(figsize=(12, 0.6 * schedule.num_ranks + 1.2), layout="constrained")
    axes = figure.subplots()
    for rank, (actions, times) in enumerate(zip(schedule.actions, run.times, strict=True)):
        for action, (begin, end) in zip(actions, times, strict=True):
            axes.barh(
                rank,
                end - begin,
                left=begin,
                height=0.8,
                color=_COLORS[action.kind],
                edgecolor="white",
                alpha=1.0 if action.stage < schedule.num_ranks else 0.6,
            )
            axes.text(
                (begin + end) / 2, rank, str(action.microbatch), ha="center", va="center", size=7
            )
    axes.set_yticks(range(schedule.num_ranks), [f"rank {r}" for r in range(schedule.num_ranks)])
    axes.invert_yaxis()
    axes.set_xlabel("time")
    axes.set_title(title or schedule.name)
    kinds = {action.kind for actions in schedule.actions for action in actions}
    axes.legend(
        handles=[
            Patch(color=_COLORS[kind], label=_MEANINGS[kind])
            for kind in Action.KINDS
            if kind in kinds
        ],
        loc="upper left",
        bbox_to_anchor=(1, 1),
    )
    figure.savefig(path)


def chrome_trace(run: Run) -> dict:
    """A run in the format that Chrome's tracing and Perfetto read, with one row per rank.

    Times of the run are seconds; those of the format are microseconds.
    """
    schedule = run.schedule
    events: list[Mapping] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": schedule.name}}
    ]
    for rank, (actions, times) in enumerate(zip(schedule.actions, run.times, strict=True)):
        events.append(
            {
                "name": "thread_name",
                "ph": "M",
                "pid": 0,
                "tid": rank,
                "args": {"name": f"rank {rank}"},
            }
        )
        events += [_event(action, rank, *time) for action, time in zip(actions, times, strict=True)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(run: Run, path: str | Path) -> None:
    """Writes `chrome_trace` to a file."""
    Path(path).write_text(json.dumps(chrome_trace(run)))


def _event(action: Action, rank: int, begin: float, end: float) -> Mapping:
    return {
        "name": f"{action.kind}{action.microbatch}",
        "cat": _MEANINGS[action.kind],
        "ph": "X",
        "pid": 0,
        "tid": rank,
        "ts": 1e6 * begin,
        "dur": 1e6 * (end - begin),
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }


def _cell(action: Action, schedule: Schedule) -> str:
    chunk = action.stage // schedule.num_ranks
    letter = chr(ord("a") + chunk) if schedule.chunks > 1 else ""
    return f"{action.kind}{action.microbatch}{letter}"


def legend(kinds: Iterable[str]) -> str:
    """The meanings of the letters of `as_text`."""
    return ", ".join(f"{kind} {_MEANINGS[kind]}" for kind in Action.KINDS if kind in set(kinds))


def held_microbatches(schedule: Schedule, rank: int) -> int:
    """The maximum number of activations of a stage that a rank holds at a time."""
    last = Action.WEIGHT if schedule.splits_backward else Action.BACKWARD
    held = most = 0
    for action in schedule.actions[rank]:
        held += (action.kind == Action.FORWARD) - (action.kind == last)
        most = max(most, held)
    return most
