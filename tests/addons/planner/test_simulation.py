"""Events against formulas, and against the pipeline's own simulation."""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import pytest

from tfdist.addons.monitoring.timeline import held_microbatches
from tfdist.addons.planner import Layout, Link, Transformer, estimate, goodput, machine
from tfdist.addons.planner.communication import (
    Way,
    ring_all_reduce,
    tree_all_reduce,
    two_level_all_reduce,
)
from tfdist.addons.planner.jobs import JobTimes, bottleneck, simulate_job
from tfdist.addons.planner.memory import held
from tfdist.addons.planner.simulation import (
    play,
    ring_events,
    simulate_step,
    tree_events,
    two_level_events,
)
from tfdist.addons.planner.times import PassTimes, pipeline_seconds
from tfdist.pipeline.schedules import Action, make_schedule
from tfdist.pipeline.simulation import simulate

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 1)]
MODEL = Transformer(16, 512, 8, 1000, 128)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (4, 32), (8, 8), (8, 64)])
def test_formulas_are_what_schedules_take(schedule, chunks, p, m):
    """Equal stages, to 2%; with messages that are not long, to 6%; unequal ones to 6%."""
    layout = Layout(pipeline=p, num_microbatches=m, schedule=schedule, chunks=chunks)
    real = make_schedule(schedule, p, m, chunks if chunks > 1 else None)

    def compare(ranks: list[PassTimes], hop: float, tolerance: float):
        stages = [ranks[stage % p] for stage in range(p * chunks)]
        ends, _ = play(
            real,
            [each.forward / chunks for each in stages],
            [each.backward / chunks for each in stages],
            [each.weights / chunks for each in stages],
            hop,
        )
        assert pipeline_seconds(layout, ranks, hop) == pytest.approx(max(ends), rel=tolerance)

    equal = [PassTimes(1.0, 2.0, 1.0)] * p
    compare(equal, 0.0, 0.02)
    compare(equal, 0.02, 0.06)
    compare([*equal[:-1], PassTimes(1.2, 2.4, 1.2)], 0.0, 0.06)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_play_is_the_pipelines_own_simulation(schedule, chunks):
    real = make_schedule(schedule, 4, 8, chunks if chunks > 1 else None)
    theirs = simulate(real, {Action.FORWARD: 1.0, Action.BACKWARD: 1.5, Action.WEIGHT: 0.5}, 0.1)
    stages = [1 / chunks] * real.num_stages
    ends, busy = play(real, stages, [2 * s for s in stages], [s / 2 for s in stages], 0.1)
    assert max(ends) == pytest.approx(theirs.span)
    expected = [sum(end - begin for begin, end in rank) for rank in theirs.times]
    assert busy == pytest.approx(expected)


def test_held_micro_batches_are_the_schedules():
    for (name, chunks), p, groups in itertools.product(SCHEDULES, (2, 4, 8), (1, 2, 5)):
        m = p * groups
        real = make_schedule(name, p, m, chunks if chunks > 1 else None)
        layout = Layout(pipeline=p, num_microbatches=m, schedule=name, chunks=chunks)
        for place in range(p):
            assert held(layout, place) == held_microbatches(real, place) / chunks


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_collectives_hop_by_hop(ranks):
    link, size = Link(1e-5, 1e9), 1e7
    starts = np.zeros(ranks)
    assert ring_events(size, starts, link).max() == pytest.approx(
        ring_all_reduce(size, ranks, link)
    )
    # In pieces a tree has the latency of each level once, and the bytes of a piece.
    tree = tree_events(size, starts, link).max()
    assert 0.8 < tree / tree_all_reduce(size, ranks, link) < 1.25
    if ranks >= 8:
        group = Way(ranks, 4, Link(1e-6, 1e10), Link(1e-5, 4e9), Link(1e-5, 1e9))
        assert two_level_events(size, starts, group).max() == pytest.approx(
            two_level_all_reduce(size, group), rel=1e-6
        )


def test_a_late_rank_and_a_slow_link_hold_up_a_ring():
    link = Link(1e-5, 1e9)
    late = np.zeros(16)
    late[5] = 1.0
    on_time = ring_events(1e6, np.zeros(16), link).max()
    assert ring_events(1e6, late, link).max() > 1.0 + on_time / 3
    links = [link] * 15 + [Link(1e-5, 1e8)]
    assert ring_events(1e8, np.zeros(16), links).max() == pytest.approx(
        ring_all_reduce(1e8, 16, Link(1e-5, 1e8)), rel=0.15
    )


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=8),
        Layout(data=2, tensor=2, pipeline=2, num_microbatches=8),
        Layout(pipeline=4, num_microbatches=16, schedule="interleaved", chunks=2),
        Layout(pipeline=8, num_microbatches=16, schedule="zero-bubble"),
        Layout(data=2, context=2, pipeline=2, num_microbatches=4, schedule="gpipe"),
    ],
    ids=Layout.words,
)
def test_simulated_steps_are_estimated_ones(layout):
    found = machine("a100")
    step = estimate(MODEL, found, layout, global_batch=64)
    played = simulate_step(MODEL, found, layout, global_batch=64)
    assert played.seconds == pytest.approx(step.step_seconds, rel=0.08)
    assert played.bubble == pytest.approx(step.bubble, abs=0.1)
    assert played.straggler == 0


def test_slow_ranks():
    layout = Layout(data=64, pipeline=4, num_microbatches=8)
    found = machine("a100")
    plain = simulate_step(MODEL, found, layout, global_batch=1024)
    one = simulate_step(MODEL, found, layout, global_batch=1024, slow_ranks=1, slowness=2.0)
    # All wait for it, but for the bubble that was there anyway.
    assert 1.3 * plain.passes < plain.passes + one.straggler < 2 * plain.passes
    noisy = simulate_step(MODEL, found, layout, global_batch=1024, jitter=0.05)
    # Of 64 normal draws the largest lies about 2.4 deviations off.
    assert 0.05 < noisy.straggler / plain.passes < 0.2


def test_16384_ranks_in_seconds():
    model = Transformer(128, 25_600, 160, 51_200, 2048)
    layout = Layout(
        data=64, pipeline=32, tensor=8, num_microbatches=64, schedule="interleaved", chunks=4,
        dtype="mixed_bfloat16", zero_stage=1, recompute="selective", sequence_parallel=True,
    )  # fmt: skip
    begin = time.process_time()
    found = simulate_step(
        model, machine("h100"), layout, global_batch=4096, jitter=0.02, slow_ranks=3
    )
    ring = ring_events(1e9, np.zeros(4096), Link(1e-5, 5e10))
    assert time.process_time() - begin < 20
    assert found.straggler > 0 and ring.max() > 0.04
    with pytest.raises(ValueError, match="forward passes"):
        longer = dataclasses.replace(layout, num_microbatches=64 * 1024)
        simulate_step(model, machine("h100"), longer, global_batch=64 * 64 * 1024)


def test_jobs_are_what_the_formula_says():
    times = JobTimes(checkpoint=6e12, storage=2e11, write=1e9, start=120, rendezvous=1e-3)
    ranks = 16_384
    played = simulate_job(ranks, times, mtbf_hours=50_000, training_hours=24 * 200)
    expected = goodput.goodput(
        ranks,
        mtbf_hours=50_000,
        save_seconds=times.save(ranks),
        restart_seconds=times.restart(ranks),
    )
    assert played.goodput == pytest.approx(expected.share, abs=0.02)
    assert played.failures == pytest.approx(played.seconds / expected.mtbf, rel=0.1)
    whole = played.goodput + played.saving + played.lost + played.restarting
    assert whole == pytest.approx(1)
    with pytest.raises(ValueError, match="reach the next save"):
        simulate_job(ranks, times, mtbf_hours=1, training_hours=1, interval=3600)


def test_what_becomes_the_bottleneck():
    star = JobTimes(checkpoint=1e12, storage=1e11, write=1e9, rendezvous=0.05)
    found = bottleneck(star, mtbf_hours=50_000)
    tree = bottleneck(dataclasses.replace(star, as_tree=True), mtbf_hours=50_000)
    assert found["rendezvous"] is not None and tree["rendezvous"] is None
    assert star.meet(16_384) > 50 * dataclasses.replace(star, as_tree=True).meet(16_384)
