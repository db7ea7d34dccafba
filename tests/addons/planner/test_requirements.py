"""What links must carry, by hand-worked figures."""

from __future__ import annotations

import pytest

from tfdist.addons.planner import (
    Layout,
    Link,
    Transformer,
    estimate,
    largest_latency,
    machine,
    requirement,
)
from tfdist.addons.planner.goodput import required_bandwidth

MODEL = Transformer(24, 1024, 16, 50_257, 1024)


def asked(layout: Layout, **changes):
    found = machine("a100", **changes)
    step = estimate(MODEL, found, layout, global_batch=64)
    return step, requirement(step, found)


def test_bandwidth_by_hand():
    """100 million float32 parameters, 2 updates a second, 8 ranks: 2 x 7/8 x 400 MB x 2 = 1.4 GB/s."""
    assert required_bandwidth(4e8, 2, 8) == pytest.approx(1.4e9)


def test_latency_by_hand():
    """A tenth of 0.2 s for 14 hops of 25 buckets each: 57 us."""
    assert largest_latency(0.2, 14 * 25) == pytest.approx(57.14e-6, rel=1e-3)


def test_a_fast_link_does():
    step, found = asked(Layout(data=8))
    busy = step.step_seconds - step.seconds["gradients"]
    assert found.bandwidth == pytest.approx(1.75 * 4 * step.parameters / busy, rel=1e-6)
    assert found.given_bandwidth == 300e9 and found.is_met and found.remedy == ""


def test_a_slow_link_has_a_remedy_that_helps():
    slow = {"inside": Link(1e-4, 5e8), "bulk": None}
    step, found = asked(Layout(data=8), **slow)
    assert not found.is_met and found.accumulation > 1 and found.compression > 1
    assert "--accumulate" in found.remedy and "--sync_every" in found.remedy
    _, squeezed = asked(Layout(data=8, compression=found.compression), **slow)
    assert squeezed.bandwidth <= squeezed.given_bandwidth * 1.001
    # So many steps of one update take their time, and send once.
    busy = step.step_seconds - step.seconds["gradients"]
    sent = 1.75 * 4 * step.parameters
    assert sent / (found.accumulation * busy) <= 5e8 < sent / ((found.accumulation - 1) * busy)


def test_a_link_of_high_latency():
    _, found = asked(Layout(data=8), inside=Link(1e-2, 300e9))
    assert not found.is_met and "latency" in found.remedy and "bandwidth" not in found.remedy


def test_shards_of_gradients_are_sent_in_each_step():
    _, found = asked(Layout(data=8, zero_stage=2, accumulation=4), inside=Link(1e-6, 1e8))
    assert found.accumulation is None and "--accumulate" not in found.remedy


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tensor=8), Layout(pipeline=8, num_microbatches=8)]
)
def test_no_gradients_to_send(layout):
    assert asked(layout)[1] is None
