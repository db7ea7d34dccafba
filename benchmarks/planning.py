"""Predictions of tfdist.addons.planner beside what layouts take on this machine.

    tfdist-plan calibrate --output=machine.json
    python -m benchmarks.planning --only=layouts --ranks=2 [--models=small,experts]
    python -m benchmarks.planning --only=limits --machine=machine.json
    python -m benchmarks.planning --only=schedules
    sudo python -m tests.hosts.planning
    python -m benchmarks.planning --only=report --machine=machine.json --table=tfdist/addons/planner/README.md

Each part adds what it measures to a file, planning.json by default, so that they may run one by one; without
`--only` all run but that of several hosts. "layouts" trains each layout in processes of their own, none of
them among what `calibrate` measures; "limits" trains layouts under a limit at which the planner says for
the first time that they fit, and clearly below what they took, both kept by the kernel (needs root: it makes
control groups); "schedules" plays pipelines of stages that wait instead of computing. "report" compares,
and ends with exit code 1 where an error is above its limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks import planning_report
from benchmarks.measuring import ENVIRONMENT
from benchmarks.planning_cases import Case, cases, limit_cases
from tfdist.addons.planner import estimate
from tfdist.addons.planner.calibration import read_machine
from tfdist.launch.plan import trials
from tfdist.testing import RankError, RankPool

PARTS = ("layouts", "limits", "schedules", "report")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
_SECONDS = 600
_MIB = 1 << 20


def measure(case: Case, engine: str, steps: int) -> dict[str, Any]:
    """Seconds of a step, in a list, and bytes of the rank that takes most, in fresh processes."""
    with RankPool(case.layout.ranks, engine, environment=ENVIRONMENT) as pool:
        found = pool.run(trials.trial, case.sizes, case.layout, case.batch, steps, timeout=_SECONDS)
    return {
        "case": case.as_json(),
        "seconds": [max(each.seconds for each in found)],
        "bytes": max(each.before + each.peak for each in found),
    }


def limited_trial(case: Case, limit: int) -> None:
    """Trains a few steps in a process that may have so many bytes; the kernel kills it at more.

    What it has already is charged to where it was taken.
    """
    import os

    base = Path("/sys/fs/cgroup/memory")
    file = "memory.limit_in_bytes"
    if not base.is_dir():
        base, file = Path("/sys/fs/cgroup"), "memory.max"
    group = base / f"tfdist-{os.getpid()}"
    group.mkdir()
    (group / file).write_text(str(limit - psutil.Process().memory_info().rss))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    trials.trial(case.sizes, case.layout, case.batch, 3)


def lives(case: Case, engine: str, limit: int) -> bool:
    """Whether a layout trains where each of its ranks has so many bytes."""
    groups: list[Path] = []
    try:
        with RankPool(case.layout.ranks, engine, environment=ENVIRONMENT) as pool:
            pool.run(_nothing)
            groups = [
                path / f"tfdist-{pid}"
                for path in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
                for pid in pool.pids
            ]
            pool.run(limited_trial, case, limit, timeout=_SECONDS)
        return True
    except RankError as error:
        # Anything but the kernel's SIGKILL is a mistake.
        if "SIGKILL" not in str(error):
            raise
        return False
    finally:
        for group in groups:
            if group.is_dir():
                _remove(group)


def _nothing() -> None:
    pass


def _remove(group: Path) -> None:
    """Removes a control group, whose processes may still be about to end."""
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)
    group.rmdir()


def measure_limits(machine_file: str, engine: str) -> list[dict[str, Any]]:
    """Layouts at the least limit at which they are said to fit, and at 0.7 of their bytes."""
    machine = read_machine(machine_file)
    rows = []
    for case in limit_cases():
        found = estimate(
            case.sizes,
            machine.replace(ranks_per_host=case.layout.ranks),
            case.layout,
            global_batch=case.batch,
        )
        least = int(found.memory.total * (1 + machine.memory_margin)) + _MIB
        row: dict[str, Any] = {"case": case.as_json()}
        row |= {"limit": least, "lived": lives(case, engine, least)}
        row["below"] = below = int(0.7 * found.memory.total)
        row["lived_below"] = lives(case, engine, below)
        rows.append(row)
        _say(f"{case}: {row['limit'] >> 20} MiB {row['lived']}, {below >> 20} {row['lived_below']}")
    return rows


def measure_schedules(engine: str, stages: list[int]) -> list[dict[str, Any]]:
    """Real schedules over stages that wait: the share in which ranks are idle, and seconds of a step."""
    from benchmarks.waiting_stages import SECONDS, train_waiting

    rows = []
    for ranks in stages:
        with RankPool(ranks, engine, environment=ENVIRONMENT) as pool:
            for schedule in SCHEDULES:
                count = 2 * ranks
                chunks = 2 if schedule == "interleaved" else 1
                found = pool.run(train_waiting, schedule, count, chunks, timeout=_SECONDS)
                row = {
                    "schedule": schedule, "stages": ranks, "chunks": chunks, "microbatches": count,
                    "costs": SECONDS, "seconds": max(each[0] for each in found), "idle": found[0][1],
                }  # fmt: skip
                rows.append(row)
                _say(f"{ranks} stages, {schedule}: {row['seconds']:.3f} s, idle {row['idle']:.1%}")
    return rows


def add(path: str, part: str, rows: list[dict[str, Any]]) -> None:
    """Adds rows to a part of the file, in the place of those of the same case.

    Seconds of layouts join those that are there: their median counts.
    """
    kept = planning_report.read(path)
    by_case = {planning_report.key(row): row for row in kept.get(part, [])}
    for row in rows:
        before = by_case.get(planning_report.key(row), {}).get("seconds")
        if isinstance(before, list):
            row["seconds"] = [*before, *row["seconds"]]
    by_case |= {planning_report.key(row): row for row in rows}
    kept[part] = list(by_case.values())
    Path(path).write_text(json.dumps(kept, indent=1) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """The command line; see the module."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--only", choices=PARTS)
    flags.add_argument("--machine", help="The file of `tfdist-plan calibrate`.")
    flags.add_argument("--engine", choices=["horovod", "tensorflow"], default="horovod")
    flags.add_argument("--ranks", default="2,4,8", help="Numbers of ranks or stages, with commas.")
    flags.add_argument("--models", default="small,large,experts", help="The models, with commas.")
    flags.add_argument("--steps", type=int, default=10)
    flags.add_argument("--json", default="planning.json", help="A file for the measurements.")
    flags.add_argument("--table", help="A document for the tables.")
    options = flags.parse_args()
    parts = PARTS if options.only is None else (options.only,)
    if {"limits", "report"} & set(parts) and not options.machine:
        flags.error("--machine=FILE of `tfdist-plan calibrate` is required")
    sizes = [int(each) for each in options.ranks.split(",")]
    if "layouts" in parts:
        for ranks in sizes:
            for case in cases(ranks):
                if case.name in options.models.split(","):
                    row = measure(case, options.engine, options.steps)
                    add(options.json, "layouts", [row])
                    _say(f"{case}: {1e3 * row['seconds'][-1]:.0f} ms, {row['bytes'] >> 20} MiB")
    if "limits" in parts:
        add(options.json, "limits", measure_limits(options.machine, options.engine))
    if "schedules" in parts:
        add(options.json, "schedules", measure_schedules(options.engine, sizes))
    if "report" in parts:
        machine = read_machine(options.machine)
        return planning_report.report(options.json, machine, options.table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
