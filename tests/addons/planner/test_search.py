"""The search: it finds what trying all finds, in little time; and what it says of the rest."""

from __future__ import annotations

import random
import time

import pytest

from tests.processes import python
from tfdist.addons.planner import MLP, ConvNet, Limits, Link, Transformer, estimate, machine, plan
from tfdist.addons.planner.estimates import misfit
from tfdist.addons.planner.search import Search, _key
from tfdist.addons.planner.stages import cut

SMALL = Transformer(8, 256, 8, 512, 128)
MODELS = [
    SMALL,
    Transformer(6, 192, 6, 1000, 256, kv_heads=2, gated=True, experts=4),
    Transformer(3, 64, 4, 64, 32, blockwise=True, tied=False),
    MLP([64, 256, 256, 10]),
    ConvNet(32, 3, [16, 32, 64], 10, strides=[1, 2, 2]),
]


def by_brute_force(model, found, batch, ranks, limits, count):
    search = Search(model, found, batch, ranks, limits, count)
    estimates = [
        estimate(model, found, layout, global_batch=batch, memory=limits.memory)
        for layout in search.every()
    ]
    return estimates, sorted((each for each in estimates if each.fits), key=_key)[:count]


@pytest.mark.parametrize("seed", range(12))
def test_pruning_loses_nothing(seed):
    draw = random.Random(seed)
    model = draw.choice(MODELS)
    found = machine(
        draw.choice(["a100", "t4", "h100"]),
        ranks_per_host=draw.choice([1, 2, 4, 8]),
        memory=draw.choice([20e6, 60e6, 200e6, 1e9]),
        overlap=draw.choice([0.0, 0.5, 1.0]),
        processors=draw.choice([None, 1, 2]),
        base_bytes=draw.choice([0.0, 5e6]),
        fragmentation=draw.choice([1.0, 1.4]),
        memory_margin=draw.choice([0.0, 0.1]),
    )
    limits = Limits(
        dtype=draw.choice(["float32", "mixed_float16", "deepspeed"]),
        accumulation=draw.choice([None, 1, 2]),
    )
    batch, ranks = draw.choice([8, 12, 16]), draw.choice([1, 2, 4, 6, 8])
    every, expected = by_brute_force(model, found, batch, ranks, limits, 3)
    chosen = plan(model, found, global_batch=batch, ranks=ranks, limits=limits)
    assert [each.layout for each in chosen.best] == [each.layout for each in expected]
    assert [each.step_seconds for each in chosen.best] == [each.step_seconds for each in expected]
    # Of each kind that is not taken the reason is the one of the best of that kind.
    kinds = {each.layout.kind for each in chosen.best}
    for rejection in chosen.rejected:
        fit = [each for each in every if each.fits and each.layout.kind == rejection.kind]
        if fit:
            assert rejection.estimate.layout == min(fit, key=_key).layout
        else:
            assert rejection.estimate is None
            assert "too large" in rejection.reason or "cannot be split" in rejection.reason
        assert rejection.kind not in kinds


@pytest.mark.slow
def test_a_trillion_parameters_on_16384_ranks():
    model = Transformer(128, 25_600, 160, 51_200, 2048)
    begin = time.process_time()
    chosen = plan(
        model,
        machine("h100"),
        global_batch=4096,
        ranks=16_384,
        limits=Limits(dtype="mixed_bfloat16"),
    )
    assert time.process_time() - begin < 60
    assert chosen.best[0].layout.ranks == 16_384 and chosen.best[0].fits
    assert 1e12 < chosen.parameters < 1.02e12
    assert chosen.considered > 100_000


def test_the_search_takes_little_memory_and_no_tensorflow():
    program = """
import sys
from tfdist.addons.planner import *
plan(Transformer(64, 8192, 64, 51200, 2048), machine("h100"), global_batch=1024, ranks=1024)
assert "tensorflow" not in sys.modules and "keras" not in sys.modules
from tfdist.addons.monitoring.process_memory import peak_bytes
print(peak_bytes())
"""
    assert int(python(program)) < 2**30


def test_every_layout_is_counted_once():
    search = Search(SMALL, machine("a100"), 16, 8, Limits(), 3)
    every = list(search.every())
    assert len(every) == len(set(every)) > 100
    assert all(each.ranks == 8 and misfit(SMALL, each, 16) is None for each in every)


def test_the_reason_names_what_binds():
    big = Transformer(24, 2048, 16, 50_257, 1024)
    chosen = plan(
        big,
        machine("a100", memory="12GiB"),
        global_batch=64,
        ranks=8,
        limits=Limits(axes=("data", "tensor"), zero_stages=(0,), recompute=("none",)),
    )
    reasons = {each.kind: each.reason for each in chosen.rejected}
    assert "too large" in reasons["data"] and "optimizer" in reasons["data"]
    assert "too large" in chosen.table() and "of 12 GiB" in chosen.table()


def test_nothing_fits():
    chosen = plan(SMALL, machine("a100", memory="1MiB"), global_batch=8, ranks=4)
    assert chosen.best == () and "No layout fits" in str(chosen)
    reasons = [each.reason for each in chosen.rejected]
    assert all("too large" in reason or "cannot be split" in reason for reason in reasons)


def test_a_slow_link_moves_the_tensor_axis_into_the_host():
    wide = Transformer(8, 4096, 32, 32_000, 1024)
    slow = machine("a100", ranks_per_host=4, between=Link(1e-4, 1e9), memory="24GiB")
    best = plan(wide, slow, global_batch=16, ranks=8).best[0].layout
    assert best.tensor <= 4


@pytest.mark.parametrize("seed", range(20))
def test_stages_are_cut_best(seed):
    draw = random.Random(seed)
    counts = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
    costs = [draw.choice([0.0, 0.5, 1.0, 2.3]) for _ in counts]
    layers = [cost for count, cost in zip(counts, costs, strict=True) for _ in range(count)]
    for stages in range(1, min(len(layers), 5) + 1):
        found = cut(counts, costs, stages)
        assert len(found) == stages and all(sum(stage) for stage in found)
        assert [sum(each) for each in zip(*found, strict=True)] == counts
        most = max(sum(n * cost for n, cost in zip(stage, costs, strict=True)) for stage in found)
        assert most == pytest.approx(_least(layers, stages), abs=1e-4)


def _least(layers, stages):
    if stages == 1:
        return sum(layers)
    return min(
        max(sum(layers[:first]), _least(layers[first:], stages - 1))
        for first in range(1, len(layers) - stages + 2)
    )
