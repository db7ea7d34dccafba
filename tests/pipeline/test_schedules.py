"""Schedules as data: sound for all sizes, with the papers' bubbles, memory and errors."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tfdist.pipeline.schedules import SCHEDULES, Action, make_schedule
from tfdist.pipeline.simulation import UNIT_COSTS, check_schedule, needs, simulate

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 8, 16, 24)]


def bubble(run) -> float:
    """Mean idle time of ranks over their computing time, as in the papers."""
    return run.idle_share / (1 - run.idle_share)


def schedules(*names):
    """All schedules of these names that exist for some sizes."""
    for name, (ranks, microbatches) in itertools.product(names, SIZES):
        for chunks in (2, 3) if name == "interleaved" else (None,):
            if name != "interleaved" or microbatches % ranks == 0:
                yield make_schedule(name, ranks, microbatches, chunks)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_sound(name):
    count = 0
    for schedule in schedules(name):
        check_schedule(schedule)
        count += 1
    assert count >= 15


@pytest.mark.parametrize("name", SCHEDULES)
def test_forward_comes_before_backward_and_sends_meet_receives(name):
    for schedule in schedules(name):
        for rank, actions in enumerate(schedule.actions):
            place = {action: index for index, action in enumerate(actions)}
            for action in actions:
                if action.kind == Action.BACKWARD:
                    assert place[dataclasses.replace(action, kind=Action.FORWARD)] < place[action]
                if action.kind == Action.WEIGHT:
                    assert place[dataclasses.replace(action, kind=Action.BACKWARD)] < place[action]
                assert schedule.rank_of(action.stage) == rank
        sent = [
            (needed, action)
            for rank, actions in enumerate(schedule.actions)
            for action in actions
            for needed in needs(action, schedule)
            if schedule.rank_of(needed.stage) != rank
        ]
        # Each micro-batch crosses each border between ranks once in each direction.
        borders = schedule.num_stages - 1 if schedule.num_ranks > 1 else 0
        assert len(sent) == len(set(sent)) == 2 * borders * schedule.num_microbatches


def test_bubble_of_gpipe_and_1f1b_is_that_of_the_papers():
    """Idle over ideal time is (p - 1) / m, whatever forward and backward cost."""
    for schedule in schedules("gpipe", "1f1b"):
        p, m = schedule.num_ranks, schedule.num_microbatches
        for costs in (
            UNIT_COSTS,
            {Action.FORWARD: 2.0, Action.BACKWARD: 3.0, Action.WEIGHT: 0.5},
        ):
            run = simulate(schedule, costs)
            assert bubble(run) == pytest.approx((p - 1) / m)
            assert run.idle_share == pytest.approx((p - 1) / (m + p - 1))


def test_interleaving_divides_the_bubble_by_the_chunks():
    for schedule in schedules("interleaved"):
        p, m, v = schedule.num_ranks, schedule.num_microbatches, schedule.chunks
        assert bubble(simulate(schedule)) == pytest.approx((p - 1) / (v * m))


def test_zero_bubble_has_a_third_of_the_bubble_of_1f1b():
    """(p - 1)(F + B - W) of idle time, with equal costs; ZB-H1 needs p micro-batches for it."""
    for schedule in schedules("zero-bubble"):
        p, m = schedule.num_ranks, schedule.num_microbatches
        if m >= p:
            assert bubble(simulate(schedule)) == pytest.approx((p - 1) / (3 * m))


def held_microbatches(schedule, rank: int) -> int:
    """By the add-on that draws schedules."""
    return pytest.importorskip("tfdist.addons.monitoring.timeline").held_microbatches(
        schedule, rank
    )


def test_1f1b_holds_as_many_microbatches_as_there_are_stages_left():
    for schedule in schedules("1f1b"):
        p, m = schedule.num_ranks, schedule.num_microbatches
        assert [held_microbatches(schedule, r) for r in range(p)] == [
            min(p - r, m) for r in range(p)
        ]


def test_gpipe_holds_all_microbatches_and_zero_bubble_one_a_rank():
    for schedule in schedules("gpipe"):
        held = {held_microbatches(schedule, rank) for rank in range(schedule.num_ranks)}
        assert held == {schedule.num_microbatches}
    for schedule in schedules("zero-bubble"):
        held = {held_microbatches(schedule, rank) for rank in range(schedule.num_ranks)}
        assert held == {min(schedule.num_ranks, schedule.num_microbatches)}


def with_actions(schedule, rank, actions):
    all_actions = list(schedule.actions)
    all_actions[rank] = tuple(actions)
    return dataclasses.replace(schedule, actions=tuple(all_actions))


def test_a_deadlock_is_found_and_told():
    good = make_schedule("1f1b", 2, 2)
    # The first rank wants its gradient back before it has sent what the last needs.
    first = good.actions[0]
    backward_first = [first[0], first[2], first[1], first[3]]
    bad = with_actions(good, 1, [*good.actions[1][2:], *good.actions[1][:2]])
    with pytest.raises(ValueError, match=r"it deadlocks: rank 0 at B0@0, which requires B0@1"):
        check_schedule(with_actions(bad, 0, backward_first))


def test_missing_and_repeated_actions_are_found():
    good = make_schedule("gpipe", 2, 2)
    with pytest.raises(ValueError, match=r"Rank 1 .* Missing or unexpected: \['B1@1'\]"):
        check_schedule(with_actions(good, 1, [a for a in good.actions[1] if str(a) != "B1@1"]))
    with pytest.raises(ValueError, match="some are repeated"):
        check_schedule(with_actions(good, 0, [*good.actions[0], good.actions[0][0]]))
    with pytest.raises(ValueError, match=r"F0@1"):
        check_schedule(with_actions(good, 0, [*good.actions[0], Action(Action.FORWARD, 1, 0)]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 4), r"`name` must be one of '1f1b', 'gpipe'.*Received: name='2f2b'"),
        (("1f1b", 0, 4), "`num_ranks` must be an int of at least 1. Received: num_ranks=0"),
        (
            ("1f1b", 2, 0),
            "`num_microbatches` must be an int of at least 1. Received: num_microbatches=0",
        ),
        (
            ("interleaved", 4, 6),
            "multiple of the pipeline size. Received: 6 micro-batches, pipeline=4",
        ),
        (
            ("interleaved", 2, 4, 0),
            "`chunks` must be an int of at least 1 or None. Received: chunks=0",
        ),
        (("gpipe", 2, 4, 2), "require the interleaved schedule. Received: 'gpipe' with chunks=2"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)
