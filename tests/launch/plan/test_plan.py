"""`tfdist-plan`: what it prints, the files it writes and reads, and its refusals."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from tfdist.addons.planner import Layout, Transformer, estimate, laws, machine
from tfdist.addons.planner.calibration import read_machine, write_machine


def plan(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "tfdist.launch.plan.main", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        cwd=cwd,
    )


def test_help_fits_a_screen():
    finished = plan("--help")
    assert finished.returncode == 0 and len(finished.stdout.splitlines()) < 24


def test_a_plan_has_a_table_reasons_code_and_flags(tmp_path):
    picture = tmp_path / "plan.svg"
    finished = plan(
        "--preset=gpt2", "--machine=t4", "--ranks=4", "--batch_size=16", f"--picture={picture}"
    )
    assert finished.returncode == 0, finished.stderr
    for part in ("not chosen", "reason", "tfdist-train --", "strategies.auto", "model FLOPs"):
        assert part in finished.stdout
    assert "<svg" in picture.read_text()[:1000]


def test_what_does_not_fit_is_said():
    finished = plan("--preset=gpt3-175b", "--machine=t4", "--ranks=4")
    assert finished.returncode == 1 and "No layout fits" in finished.stdout
    assert "too large" in finished.stdout


def test_a_machine_from_a_file_and_its_mark(tmp_path):
    path = tmp_path / "machine.json"
    write_machine(path, machine("t4", calibrated={"ranks": 2.0}))
    finished = plan(f"--machine={path}", "--ranks=16", "--layers=2", "--width=64", "--heads=4")
    assert finished.returncode == 0, finished.stderr
    assert "extrapolated" in finished.stdout
    finished = plan(f"--machine={path}", "--ranks=2", "--steps=uncompiled")
    assert finished.returncode == 2 and "--steps requires a device" in finished.stderr


def test_steps_of_a_gpu_are_told():
    sizes = ("--machine=h100", "--ranks=1", "--layers=2", "--width=64", "--heads=4")
    assert "compiled by XLA, which reach 36% of the peak" in plan(*sizes).stdout
    assert "without XLA, which reach 9% of the peak" in plan(*sizes, "--steps=uncompiled").stdout


def test_a_configuration_from_a_file(tmp_path):
    config = {
        "num_layers": 2,
        "hidden_dim": 64,
        "num_heads": 4,
        "vocabulary_size": 100,
        "max_sequence_length": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps({"class_name": "GPT2", "config": config}))
    assert plan(f"--preset={tmp_path}", "--ranks=2").returncode == 0
    (tmp_path / "config.json").write_text("[" * 10_000)
    finished = plan(f"--preset={tmp_path}", "--ranks=2")
    assert finished.returncode == 2 and finished.stderr.count("\n") == 1


def test_refusals():
    for arguments, said in (
        (["--machine=none"], "--machine"),
        (["--memory=lots"], "--memory"),
        (["--ranks=7", "--hosts=2"], "--hosts"),
        (["--heads=5"], "divisible"),
        (["--preset=gpt2", "--layers=3"], "--layers"),
        (["--dtype=float64"], "--dtype"),
        (["fit"], "requires files of runs"),
        (["fit", "/no/such/file"], "does not exist"),
        (["optimum"], "--flops or --parameters"),
        (["goodput", "--interval=0"], "--interval"),
        (["calibrate", "--output=/no/such/folder/machine.json"], "cannot be written"),
    ):
        finished = plan(*arguments)
        assert finished.returncode == 2, arguments
        assert said in finished.stderr and finished.stderr.count("\n") == 1, finished.stderr


def test_losses_of_both_laws():
    printed = plan("optimum", "--parameters=1.5e9", "--tokens=2.2e10").stdout
    for formula, loss in (
        ("(8.8e13/N)^0.076", "2.304"),
        ("(5.4e13/D)^0.095", "2.099"),
        ("1.8172 + 482.01/N^0.3478 + 2085.43/D^0.3658", "2.471"),
    ):
        assert f"{formula} " in printed and loss in printed, printed
    assert plan("optimum", "--flops=1e21", "--tokens=1e9").returncode == 2


def test_a_fit_of_runs(tmp_path):
    law = laws.Law(1.7, 400.0, 900.0, 0.34, 0.31)
    runs = [
        {"parameters": n, "tokens": d, "loss": law.loss(n, d)}
        for n in (1e7, 1e8, 1e9)
        for d in (1e9, 1e10, 1e11)
    ]
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(map(json.dumps, runs)))
    finished = plan("fit", str(path))
    assert finished.returncode == 0, finished.stderr
    assert "N^0.34" in finished.stdout and "95% intervals" in finished.stdout
    path.write_text("\n".join(json.dumps({"ranks": n, "seconds": 1 + 9 / n}) for n in (1, 2, 4)))
    assert "10.00%" in plan("fit", str(path)).stdout
    for broken in ("nonsense", '{"ranks": true, "seconds": 1}', '{"loss": 1}'):
        path.write_text(broken)
        assert plan("fit", str(path)).returncode == 2
    assert plan("fit", "/none").stderr.strip() == "tfdist-plan: /none does not exist."


def test_rates_are_found_again():
    """What a machine would take, back to the machine."""
    from tfdist.launch.plan.calibrating import _ALONE, _model, fit_rates

    true = machine("a100").replace(
        flops={"float32": 5e10}, efficiency=1.0, memory_efficiency=1.0, memory_bandwidth=4e9,
        layer_seconds=1e-3, step_seconds=5e-3,
    )  # fmt: skip
    models = [_model(layers, width) for layers, width, _ in _ALONE]
    rows = [each[2] for each in _ALONE]
    seconds = [
        estimate(model, true, Layout(), global_batch=batch).step_seconds
        for model, batch in zip(models, rows, strict=True)
    ]
    step, layer, flop, byte = fit_rates(models, rows, seconds)
    assert step == pytest.approx(5e-3, rel=0.02) and layer == pytest.approx(1e-3, rel=0.02)
    assert 1 / flop == pytest.approx(5e10, rel=0.02) and 1 / byte == pytest.approx(4e9, rel=0.02)
    limited = fit_rates(models, rows, seconds, fastest=3e9)
    assert 1 / limited[3] == pytest.approx(3e9, rel=0.02) and min(limited) >= 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_this_machine_is_measured(tmp_path):
    path = tmp_path / "machine.json"
    finished = plan("calibrate", f"--output={path}", "--engine=tensorflow")
    assert finished.returncode == 0, finished.stderr
    found = read_machine(path)
    assert str(path) in finished.stderr
    assert 1e8 < found.flops["float32"] < 1e13 and 1e7 < found.memory_bandwidth < 1e12
    step = estimate(Transformer(2, 64, 2, 64, 32), found, Layout(data=2), global_batch=4)
    assert 0 < step.step_seconds < 10 and math.isfinite(step.memory.total)
