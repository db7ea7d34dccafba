"""Flags of the optimizer and of dtypes: two ranks reach the losses that one process reaches with them."""

from __future__ import annotations

import os
import re

import pytest

from tests.launch.processes import BIN, run
from tfdist.launch.flags.optimizer import read_recompute

#: A decay that is not to be seen, an average that lags behind, and norms that are cut: each changes the
#: numbers. Float16 rounds, by other sums on other ranks.
CASES = {
    "optimizer": (["--optimizer=lion", "--learning_rate=0.001"], 1e-3),
    "decay and clip": (["--optimizer=sgd", "--weight_decay=0.1", "--clip_norm=0.1"], 1e-3),
    "average": (["--ema=0.9"], 1e-3),
    "accumulate": (["--accumulate=3"], 1e-3),
    "loss scale": (["--loss_scale=4096"], 1e-3),
    "float16": (["--dtype_policy=mixed_float16"], 2e-2),
    "bfloat16": (["--dtype_policy=mixed_bfloat16"], 5e-2),
    "budget": (["--recompute=budget:300KiB"], 1e-3),
    "deterministic": (["--deterministic"], 1e-3),
}
#: Cases in which the numbers are those of the defaults, and those that may round to the same.
SAME = ("loss scale", "budget", "deterministic")
CLOSE = ("float16", "bfloat16")


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "text"
    text.write_bytes(b"The quick brown fox jumps over the lazy dog. " * 40)
    sizes = ["--layers=2", "--width=16", "--heads=2", "--seq_length=16", "--batch_size=8"]
    program = os.path.join(BIN, "tfdist-train")
    return [program, "--model=gpt", "--epochs=2", f"--dataset=text:{text}", "--threads=1", *sizes]


def losses(command) -> list[float]:
    job = run(command, timeout=200)
    assert job.returncode == 0, job.stdout[-3000:] + job.stderr[-3000:]
    found = re.findall(r" - loss: ([\d.]+).* - val_loss: ([\d.]+)", job.stdout)
    assert len(found) == 2, job.stdout[-3000:]
    last = re.search(r"Validation loss ([\d.]+)", job.stdout)
    return [float(value) for epoch in found for value in epoch] + [float(last[1])]


@pytest.fixture(scope="module")
def defaults(gpt):
    return losses(gpt)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_reach_what_one_process_reaches(case, gpt, request):
    flags, tolerance = CASES[case]
    ranks = [os.path.join(BIN, "tfdist-run"), "-np=2", "--engine=tensorflow", "--"]
    alone, together = losses([*gpt, *flags]), losses([*ranks, *gpt, *flags])
    assert together == pytest.approx(alone, abs=tolerance)
    defaults = request.getfixturevalue("defaults")
    if case in CLOSE:
        assert alone == pytest.approx(defaults, abs=0.2)
        return
    assert (alone == pytest.approx(defaults, abs=1e-3)) == (case in SAME), (alone, defaults)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_accumulated_steps_in_a_pipeline_and_with_zero(gpt):
    flags = ["--accumulate=2", "--loss_scale=1024", "--clip_norm=0.5"]
    alone = losses([*gpt, *flags])
    ranks = [os.path.join(BIN, "tfdist-run"), "-np=2", "--engine=tensorflow", "--"]
    for layout in (["--zero_stage=2"], ["--pipeline=2"]):
        assert losses([*ranks, *gpt, *flags, *layout]) == pytest.approx(alone, abs=2e-3), layout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--sync_every=4", "--ema=0.9"], "--ema=0.9 with --sync_every"),
        (["--sync_every=4", "--loss_scale=8"], "--loss_scale=8 with --sync_every"),
        (["--strategy=tpu", "--dtype_policy=float32"], "--dtype_policy is not supported on a TPU"),
        (["--strategy=tpu", "--deterministic"], "--deterministic is not supported on a TPU"),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(flags, words):
    job = run([os.path.join(BIN, "tfdist-train"), *flags])
    assert job.returncode == 2
    assert job.stderr.count("\n") == 1 and words in job.stderr, job.stderr


def test_a_budget_has_a_unit():
    assert read_recompute("recompute", "budget:1.5MiB") == {
        "policy": "budget",
        "budget": 1.5 * 2**20,
    }
    assert read_recompute("recompute", "none") == {}
    assert read_recompute("recompute", "sqrt") == {"policy": "sqrt"}
