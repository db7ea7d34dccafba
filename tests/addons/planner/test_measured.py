"""The benchmark of the planner: what its report refuses, and schedules of real ranks beside simulated ones."""

from __future__ import annotations

import copy
import json

import pytest

from benchmarks import planning_report
from benchmarks.planning_cases import Case, cases, limit_cases
from tests.conftest import on_ranks
from tfdist.addons.planner import Link, Machine, estimate
from tfdist.addons.planner.simulation import play
from tfdist.pipeline.schedules import make_schedule

MACHINE = Machine(
    {"float32": 1e11}, 1e10, 1e10, Link(1e-4, 1e9), processors=2, base_bytes=5e8, memory_margin=0.1
)


def estimate_of(case: Case):
    machine = MACHINE.replace(ranks_per_host=case.layout.ranks)
    return estimate(case.sizes, machine, case.layout, global_batch=case.batch)


def as_predicted() -> dict:
    """Measurements of a machine that the planner knows to the last digit."""
    layouts = [
        {"case": case.as_json(), "seconds": [found.step_seconds], "bytes": found.memory.total}
        for ranks in (2, 4, 8)
        for case in cases(ranks)
        for found in (estimate_of(case),)
    ]
    limits = [
        {"case": case.as_json(), "limit": int(1.2 * estimate_of(case).memory.total), "lived": True,
         "below": 1, "lived_below": False}
        for case in limit_cases()
    ]  # fmt: skip
    schedules = [
        {"schedule": "1f1b", "stages": 2, "chunks": 1, "microbatches": 4, "costs": [1.0, 1.0, 1.0],
         "seconds": 15.0, "idle": 0.2},
    ]  # fmt: skip
    return {"layouts": layouts, "limits": limits, "schedules": schedules}


def report(tmp_path, measured: dict) -> int:
    path = tmp_path / "planning.json"
    path.write_text(json.dumps(measured))
    return planning_report.report(str(path), MACHINE, None)


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("layouts", {"seconds": [10.0]}),
        ("limits", {"lived": False}),
        ("schedules", {"seconds": 17.0}),
        ("schedules", {"idle": 0.35}),
    ],
)
def test_a_report_refuses_what_is_off(tmp_path, part, changes, capsys):
    measured = as_predicted()
    assert report(tmp_path, measured) == 0
    assert f"{len(measured['layouts'])} layouts" in capsys.readouterr().out
    wrong = copy.deepcopy(measured)
    wrong[part][0] |= changes
    assert report(tmp_path, wrong) == 1


def test_ranks_that_share_a_processor():
    """They take turns, and longer where these cost something; latencies are not added up."""
    case = next(case for case in cases(8) if case.layout.tensor == 2)
    first = MACHINE.replace(ranks_per_host=8, step_seconds=0.0)

    def seconds(**changes):
        machine = first.replace(**changes)
        found = estimate(case.sizes, machine, case.layout, global_batch=case.batch)
        return sum(found.seconds[kind] for kind in ("compute", "tensor"))

    none = Link(0.0, 1e9)
    alone = seconds(processors=8, inside=none)
    assert seconds(inside=none) == pytest.approx(4 * alone)
    assert seconds(inside=none, crowding=0.5) == pytest.approx(8 * alone)
    waits = seconds(processors=8, inside=Link(1e-4, 1e9)) - alone
    assert waits > 0
    assert seconds(inside=Link(1e-4, 1e9)) == pytest.approx(4 * alone + waits)


def test_a_case_is_read_as_it_was_written():
    for case in (*cases(2), *cases(4), *cases(8), *limit_cases()):
        assert Case.from_json(json.loads(json.dumps(case.as_json()))) == case


@on_ranks(slow=[("horovod", 2)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_a_schedule_of_real_ranks_is_idle_as_simulated(pool, schedule):
    from benchmarks.waiting_stages import SECONDS, train_waiting

    found = pool.run(train_waiting, schedule, 4, 1, timeout=300)
    forward, inputs, weights = SECONDS
    ends, busy = play(
        make_schedule(schedule, 2, 4), [forward] * 2, [inputs + weights] * 2, [weights] * 2, 0.0
    )
    idle = 1 - sum(busy) / (2 * max(ends))
    assert found[0][1] == pytest.approx(idle, abs=0.1)
