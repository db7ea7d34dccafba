"""Who is slow: a rank that sleeps is named with its section, and even ranks are not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.addons.monitoring.monitor_programs import fit_with_a_sleeper
from tests.conftest import on_ranks
from tfdist.addons.monitoring.monitor.block import Block
from tfdist.addons.monitoring.monitor.sections import Step
from tfdist.addons.monitoring.monitor.slow import SlowRanks

TIMERS = ["augment"]


def block(rng, *, step=0.1, work=0.08, more=0.0, where="forward_backward", noise=0.05) -> Block:
    """A block of 20 steps, of which `more` seconds go into one section beside what is usual."""
    steps = []
    for number in range(20):
        own = work * (1 + noise * rng.standard_normal())
        seconds = {"forward_backward": own, "input": 0.002 * rng.random()}
        seconds[where] = seconds.get(where, 0.0) + more
        seconds["communication"] = max(step + more - sum(seconds.values()), 0.0)
        length = sum(seconds.values())
        steps.append(Step(number, number + length, seconds, gradients=number + own + more))
    found = Block()
    found.take(steps, {"augment": 0}, 0.0)
    return found


@pytest.mark.parametrize("where", ["forward_backward", "input", "augment", "callbacks"])
@pytest.mark.parametrize("ranks", [2, 5])
def test_the_rank_and_its_section_are_named_once(where, ranks):
    rng, slow = np.random.default_rng(0), SlowRanks(0.25)
    found = []
    for number in range(6):
        more = [0.05 if rank == 1 and number >= 2 else 0.0 for rank in range(ranks)]
        found += slow.look([block(rng, more=each, where=where) for each in more], TIMERS)
    assert [(each.rank, each.section) for each in found] == [(1, where)]
    assert found[0].excess == pytest.approx(0.05, rel=0.2)
    score = slow.scores[1]
    assert 0.5 < score["score"] < 0.75 and 0.5 < score["score_of_past"] < 0.75
    if where == "forward_backward":
        assert score["came_last"] > 0.95
    assert max(each["score"] for each in slow.scores.values()) == 1


def test_a_rank_that_recovers_is_named_again_when_it_slows_down_again():
    rng, slow = np.random.default_rng(0), SlowRanks(0.25)
    count = 0
    for more in (0.05, 0.05, 0.0, 0.0, 0.05, 0.05):
        count += len(slow.look([block(rng), block(rng, more=more)], TIMERS))
    assert count == 2


def test_noise_names_nobody():
    rng, slow = np.random.default_rng(0), SlowRanks(0.25)
    for _ in range(500):
        assert not slow.look([block(rng, noise=0.3) for _ in range(4)], TIMERS)


def test_a_block_without_steps_says_nothing():
    rng, slow = np.random.default_rng(0), SlowRanks(0.25)
    assert slow.look([block(rng), Block()], TIMERS) == []
    assert slow.look([block(rng)], TIMERS) == []


@pytest.mark.slow  # It compares times, which a busy machine disturbs.
@on_ranks(("horovod", 2), slow=[("tensorflow", 2)])
def test_a_sleep_of_50_ms_is_named_within_50_steps(pool):
    found, _ = pool.run(fit_with_a_sleeper, 1, "augment", 0.05, 90, timeout=200)
    assert len(found) == 1, found
    step, words = found[0].split(" ", 1)
    assert 30 < int(step) <= 80
    assert words.startswith("Rank 1 on ") and "`augment`" in words


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_nobody_is_named_in_1000_even_steps(pool):
    assert pool.run(fit_with_a_sleeper, None, "", 0.0, 1000, timeout=290) == [[], []]
