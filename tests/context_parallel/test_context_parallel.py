"""Attention over a context axis gives what one rank gives, and so does training on one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import on_ranks, skip_without, slow_but
from tests.context_parallel import context_programs as programs
from tfdist.context_parallel import KINDS


def check(pool, kind, causal, mask=None, tolerance=1e-5, **options):
    shapes = {name: value for name, value in options.items() if name not in ("eager", "dtype")}
    expected = programs.plain(mask, causal, **shapes)
    results = pool.run(programs.on_rank, kind, causal, mask, timeout=200, **options)
    for name, found, right in zip(
        ("out", "dq", "dk", "dv"), programs.joined(results), expected, strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance, err_msg=name)


@on_ranks(("horovod", 2), slow=[("horovod", 4), ("tensorflow", 3)])
@pytest.mark.parametrize("kind", slow_but(["ring", "ulysses"], KINDS))
def test_attention_is_that_of_one_rank(pool, kind):
    for causal in (True, False):
        check(pool, kind, causal, heads=12, key_heads=12, time=24)
        check(pool, kind, causal, heads=24, key_heads=12, time=21)


@pytest.mark.slow
@on_ranks(("horovod", 2), ("horovod", 4))
@pytest.mark.parametrize("kind", KINDS)
def test_masks(pool, kind):
    for mask in ("keys", "pairs"):
        check(pool, kind, True, mask, time=21)
        check(pool, kind, False, mask, time=16)


@pytest.mark.slow
@on_ranks(("horovod", 4))
@pytest.mark.parametrize("kind", KINDS)
def test_sizes(pool, kind):
    # Several blocks; key/value heads for several ranks each; a rank with one token.
    check(pool, kind, True, batch=1, time=2300)
    check(pool, kind, True, heads=8, key_heads=2, time=23)
    check(pool, kind, False, heads=8, key_heads=1, time=4)


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 3))
@pytest.mark.parametrize("kind", KINDS)
def test_eager_steps_and_bfloat16(pool, kind):
    check(pool, kind, True, heads=6, key_heads=6, time=13, eager=True)
    check(pool, kind, False, tolerance=0.05, heads=6, key_heads=6, time=13, dtype="bfloat16")


_single: dict = {}


def single(one_process, **options):
    """The outcome of one process, trained once for all that compare with it."""
    key = repr(sorted(options.items()))
    if key not in _single:
        _single[key] = one_process.run(programs.train, None, timeout=240, **options)[0]
    return _single[key]


def check_training(pool, one_process, mesh, tolerance=1e-5, on_ranks_only=None, **options):
    history, weights = single(one_process, **options)
    found = pool.run(programs.train, mesh, timeout=300, **options, **(on_ranks_only or {}))
    for logs, own in found:
        for name, values in logs.items():
            right = np.resize(history[name], np.shape(values))
            np.testing.assert_allclose(values, right, rtol=tolerance, atol=tolerance, err_msg=name)
        for name, value in own.items():
            # In parts of the largest entry: what is near zero is a difference of such.
            largest = max(1.0, float(np.abs(weights[name]).max()))
            np.testing.assert_allclose(
                value, weights[name], rtol=0, atol=tolerance * largest, err_msg=name
            )


TWO = {"data": 1, "context": 2}


@pytest.mark.slow
@on_ranks(("horovod", 2), ("tensorflow", 3))
@pytest.mark.parametrize("time", [13, 24])
def test_gpt_trains_as_in_one_process(pool, one_process, time):
    mesh = {"data": 1, "context": -1}
    check_training(pool, one_process, mesh, time=time)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_gpt(pool, one_process, kind):
    options = {"positions": "rotary", "num_key_value_heads": 2, "weighted": True}
    here = {"context_attention": kind}
    check_training(pool, one_process, TWO, time=15, on_ranks_only=here, **options)


MESHES = {
    "context": {"data": 1, "context": 4},
    "data": {"data": 2, "context": 2, "zero_stage": 1},
    "zero": {"data": 2, "context": 2, "zero_stage": 3},
    "tensor": {"data": 1, "context": 2, "tensor": 2},
}


@pytest.mark.slow
@on_ranks(("horovod", 4), ("tensorflow", 4))
@pytest.mark.parametrize("mesh", MESHES)
def test_meshes(pool, one_process, mesh):
    check_training(pool, one_process, MESHES[mesh], time=13)


@pytest.mark.slow
@on_ranks(("horovod", 4))
def test_in_a_pipeline(pool, one_process):
    mesh = {"data": 1, "context": 2, "pipeline": 2}
    check_training(pool, one_process, mesh, on_ranks_only={"pipeline": 2}, rows=16)


@pytest.mark.slow
@on_ranks(("horovod", 2))
@pytest.mark.parametrize("kind", KINDS)
def test_recompute(pool, one_process, kind):
    here = {"policy_of_recompute": "every_layer", "context_attention": kind}
    check_training(pool, one_process, TWO, on_ranks_only=here, time=13)


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_accumulation_and_mixed_precision(pool, one_process):
    check_training(pool, one_process, TWO, accumulate=2, time=13)
    check_training(pool, one_process, TWO, 0.05, policy="mixed_bfloat16", time=13)


@on_ranks(("horovod", 2))
def test_what_a_context_axis_cannot_do_is_refused_by_name(pool):
    said = {
        "dropout": "`attention` cannot drop attention weights",
        "ulysses": '`attention` requires numbers of heads that context_attention="ulysses" can split equally',
        "short": "Received: 1 tokens",
        "positions": "at most max_length=8 positions",
        "mixes": "`mixes` (Conv1D)",
    }
    for messages in pool.run(programs.refusals, timeout=250):
        for what, words in said.items():
            assert words in messages[what], messages[what]


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_outside_of_a_step_sequences_are_whole(pool, one_process):
    right = one_process.run(programs.called, None, timeout=250)[0]
    for found in pool.run(programs.called, TWO, timeout=250):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@on_ranks(("horovod", 2))
def test_a_step_of_ones_own(pool, one_process):
    right = one_process.run(programs.own_loop, None, timeout=250)[0]
    for found in pool.run(programs.own_loop, TWO, timeout=250):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@on_ranks(("horovod", 4))
def test_batches_by_themselves(pool, one_process):
    right = one_process.run(programs.on_batches, None, timeout=250)[0]
    for found in pool.run(programs.on_batches, MESHES["data"], timeout=250):
        np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)


def limited(ranks: int) -> subprocess.CompletedProcess:
    """A GPT on a long sequence, where a rank may take as much memory as a third of it needs."""
    skip_without("horovod")
    command = [
        os.path.join(os.path.dirname(sys.executable), "tfdist-run"),
        f"-np={ranks}",
        "--engine=horovod",
        "--",
        sys.executable,
        str(Path(__file__).with_name("limited_context.py")),
    ]
    environment = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "MALLOC_ARENA_MAX": "2",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    }
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=800, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(1700)
def test_a_sequence_that_is_too_long_for_a_rank():
    alone = limited(1)
    story = alone.stdout[-6000:] + alone.stderr[-2000:]
    assert alone.returncode not in (0, 2) and "ResourceExhaustedError" in story, story
    job = limited(4)
    story = job.stdout[-6000:] + job.stderr[-2000:]
    assert job.returncode == 0, story
    (line,) = [line for line in job.stdout.splitlines() if re.search(r"losses \d", line)]
    losses = [float(word) for word in line.partition("losses")[2].split()]
    assert len(losses) == 3 and losses[-1] < losses[0], story
