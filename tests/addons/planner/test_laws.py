"""Scaling laws and goodput against published figures, and against draws."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from tfdist.addons.planner import MLP, Layout, Transformer, estimate, goodput, laws, machine
from tfdist.addons.planner.goodput import (
    checkpoint_bytes,
    required_bandwidth,
    run_cost,
    save_interval,
)


def test_chinchilla():
    """Hoffmann et al. 2022: 70 billion parameters and 1.4 trillion tokens for 5.76e23 FLOPs."""
    found = laws.CHINCHILLA.optimum(5.76e23)
    assert 70e9 in found.parameters and 1.4e12 in found.tokens
    assert found.parameters.value == pytest.approx(70e9, rel=0.1)
    assert found.tokens.value == pytest.approx(1.4e12, rel=0.1)
    # Besiroglu et al. 2024, section 4: about 20 tokens a parameter.
    assert 15 < found.tokens.value / found.parameters.value < 25
    assert laws.CHINCHILLA.loss(70e9, 1.4e12) == pytest.approx(1.97, abs=0.05)


def test_the_optimum_is_one():
    law = laws.CHINCHILLA
    best = law.optimum(1e21)
    n, d = best.parameters.value, best.tokens.value
    assert 6 * n * d == pytest.approx(1e21)
    assert law.tokens_for(n) == pytest.approx(d, rel=1e-6)
    for factor in (0.8, 0.95, 1.05, 1.25):
        assert law.loss(n * factor, d / factor) > best.loss.value
    exact = laws.Law(1.8, 400, 400, 0.34, 0.34).optimum(1e21)
    assert exact.parameters.low == exact.parameters.value == exact.parameters.high


def test_kaplan():
    """Kaplan et al. 2020, section 6: both trends meet near 1e4 petaFLOP days, 1e12 parameters."""
    flops = 1e4 * laws.PETAFLOP_DAY
    parameters, tokens = laws.kaplan_optimum(flops)
    assert 5e11 < parameters < 5e12 and 1e11 < tokens < 1e12
    assert laws.kaplan_loss(flops=flops) == pytest.approx(1.7, abs=0.1)
    # By hand: (8.8e13 / 1.5e9)^0.076, (5.4e13 / 2.2e10)^0.095 and (3.1e8 / 1)^0.050.
    assert laws.kaplan_loss(1.5e9) == pytest.approx(2.3036, abs=2e-4)
    assert laws.kaplan_loss(tokens=2.2e10) == pytest.approx(2.0992, abs=2e-4)
    assert laws.kaplan_loss(flops=laws.PETAFLOP_DAY) == pytest.approx(2.6581, abs=2e-4)
    # Section 4.1: overfitting is below 0.02 from D = 5,000 N^0.74 on.
    for parameters in (1e8, 1e9, 1e10):
        tokens = 5e3 * parameters**0.74
        excess = laws.kaplan_loss(parameters, tokens) / laws.kaplan_loss(parameters, 1e30) - 1
        assert excess == pytest.approx(0.02, abs=0.01)
    assert laws.kaplan_loss(1e9, 1e30) < laws.kaplan_loss(1e9, 1e9)
    for wrong in ({}, {"flops": 1.0, "tokens": 1.0}, {"parameters": -1.0}):
        with pytest.raises(ValueError, match="Received"):
            laws.kaplan_loss(**wrong)


def test_speed_ups():
    assert laws.amdahl(0.95, 1) == 1 and laws.amdahl(0.95, 1e12) == pytest.approx(20)
    assert laws.gustafson(0.95, 64) == pytest.approx(0.05 + 0.95 * 64)
    assert laws.parallel_efficiency(10, 5.5, 2) == pytest.approx(0.909, abs=0.001)
    assert laws.parallel_efficiency(10, 11, 2, weak=True) == pytest.approx(0.909, abs=0.001)


def test_a_serial_share_is_found():
    draw = random.Random(0)
    inside = 0
    for _ in range(60):
        ranks = [1, 2, 4, 8, 16]
        seconds = [10 * (0.1 + 0.9 / n) * draw.gauss(1, 0.01) for n in ranks]
        inside += 0.1 in laws.serial_share(ranks, seconds)
    assert inside > 50
    with pytest.raises(ValueError, match="two different"):
        laws.serial_share([2, 2], [1.0, 1.0])


def test_serial_shares_by_hand():
    # Two ranks at 5.5 s of 10 s: 10 (s + (1 - s) / 2) = 5.5, so s is a tenth.
    assert laws.serial_share([1, 2], [10.0, 5.5]).value == pytest.approx(0.1)
    # Four ranks do four times the work in 12.5 s of 10: 3.2 times as fast, and 4 - 3 s = 3.2.
    found = laws.serial_share([1, 4], [10.0, 12.5], weak=True)
    assert found.value == pytest.approx(0.8 / 3) and found.low == -np.inf
    # Speed-ups of 1.8 and 3.2: (1 x 0.2 + 3 x 0.8) / (1 + 9).
    found = laws.serial_share([1, 2, 4], [10.0, 20 / 1.8, 12.5], weak=True)
    assert found.value == pytest.approx(0.26) and found.low < 0.26 < found.high
    for wrong in ([2, 4], [10.0, 11.0]), ([1, 2], [10.0, 0.0]):
        with pytest.raises(ValueError, match="Received"):
            laws.serial_share(*wrong, weak=True)


def test_a_law_is_fitted_with_its_ranges():
    truth = laws.Law(1.7, 400.0, 900.0, 0.34, 0.31)
    draw = np.random.default_rng(1)
    n = np.repeat(10.0 ** np.arange(7, 10.1, 0.5), 6)
    d = np.tile(10.0 ** np.arange(8.5, 11.1, 0.5), 7)
    losses = [truth.loss(a, b) * math.exp(0.002 * draw.normal()) for a, b in zip(n, d, strict=True)]
    found = laws.fit_law(list(n), list(d), losses)
    assert found.alpha == pytest.approx(truth.alpha, abs=0.03)
    assert found.beta == pytest.approx(truth.beta, abs=0.03)
    expected, best = truth.optimum(1e22), found.optimum(1e22)
    assert expected.parameters.value in best.parameters
    assert best.parameters.high / best.parameters.low < 5
    for wrong in ([1e7] * 6, [1e7, 1e8]):
        with pytest.raises(ValueError, match="6 runs"):
            laws.fit_law(wrong, [1e9] * len(wrong), [3.0] * len(wrong))


@pytest.mark.parametrize(
    ("save", "mtbf", "interval"),
    [
        # Young's sqrt(2 x 60 s x 24 h) is 3,219.938 s. Daly's equation 37 multiplies it by
        # 1 + sqrt(60 / 172,800) / 3 + 60 / 172,800 / 9 = 1.00624983, and takes off 60 s.
        (60, 86_400, 3180.062),
        # sqrt(2 x 1 x 3,600) = 84.8528 by 1.00394390, less 1.
        (1, 3600, 84.1875),
        # Where a save takes twice the time between failures, he takes that time.
        (10, 4, 4.0),
    ],
)
def test_save_interval(save, mtbf, interval):
    assert save_interval(save, mtbf) == pytest.approx(interval, abs=1e-3)


def test_goodput_of_llama_405b():
    """Llama team 2024, section 3.3.4: 419 unexpected interruptions in 54 days on 16,384 GPUs, and
    more than 90% effective training time."""
    mtbf_hours = 54 * 24 / 419 * 16_384
    found = goodput.goodput(16_384, mtbf_hours=mtbf_hours, save_seconds=10, restart_seconds=600)
    assert found.mtbf == pytest.approx(3.1 * 3600, rel=0.01)
    assert 0.90 < found.share < 0.97
    whole = found.share + found.saving + found.lost + found.restarting
    assert whole == pytest.approx(1)


@pytest.mark.parametrize(("save", "restart", "mtbf"), [(10, 300, 4000), (60, 30, 1000)])
def test_goodput_is_what_draws_say(save, restart, mtbf):
    draw = random.Random(2)
    found = goodput.goodput(1, mtbf_hours=mtbf / 3600, save_seconds=save, restart_seconds=restart)
    kept, clock = 0.0, 0.0
    while kept < 4000 * found.interval:
        until = draw.expovariate(1 / mtbf)
        while until >= found.interval + save:
            kept += found.interval
            clock += found.interval + save
            until -= found.interval + save
        clock += until
        while (again := draw.expovariate(1 / mtbf)) < restart:
            clock += again
        clock += restart
    assert found.share == pytest.approx(kept / clock, rel=0.02)


def test_the_interval_is_the_best():
    best = goodput.goodput(64, mtbf_hours=5000, save_seconds=30, restart_seconds=120)
    for factor in (0.5, 2.0):
        other = goodput.goodput(
            64,
            mtbf_hours=5000,
            save_seconds=30,
            restart_seconds=120,
            interval=best.interval * factor,
        )
        assert other.share < best.share


def test_what_a_run_costs():
    model = Transformer(12, 768, 12, 50_257, 1024)
    found = machine("a100", price=2.0)
    step = estimate(model, found, Layout(data=8), global_batch=64)
    run = run_cost(step, found, 1e9, share=0.9)
    assert run.steps == math.ceil(1e9 / 65_536)
    assert run.seconds == pytest.approx(15_259 * step.step_seconds / 0.9)
    assert run.rank_hours == pytest.approx(run.seconds * 8 / 3600)
    assert run.price == pytest.approx(2 * run.rank_hours)
    assert run.kilowatt_hours == pytest.approx(0.4 * run.rank_hours)
    assert checkpoint_bytes(step) == pytest.approx(12 * step.parameters)
    assert run_cost(step, found.replace(watts=None, price=None), 1.0).price is None
    assert estimate(MLP([4, 4]), found, Layout(), global_batch=1).tokens == 1


def test_bandwidth():
    """100 million parameters in float32 at 2 updates a second on 2 ranks: 400 MB each way."""
    assert required_bandwidth(4e8, 2, 2) == 8e8
    assert required_bandwidth(4e8, 2, 1) == 0
    assert required_bandwidth(4e8, 2, 2, compression=10) == 8e7
