"""`tfdist-bench scaling`: efficiencies by hand, a user's script on real ranks, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import skip_without
from tfdist.launch.bench.scaling_report import Curve, Job

TIMEOUT = 300
#: As a user has it: nothing of tfdist but the strategy.
SCRIPT = """
import os
import keras, numpy as np, tfdist

with tfdist.strategies.auto().scope():
    layers = [keras.layers.Dense(256, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((256,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.random.default_rng(0).random((1024, 256), dtype="float32")
batch_size = {batch}
model.fit(x, x[:, :1], batch_size=batch_size, epochs={epochs}, verbose=0)
{after}
"""
FROM_VARIABLE = 'int(os.environ.get("TFDIST_BENCH_BATCH", 64))'


def scaling(
    tmp_path: Path, *flags: str, batch="64", epochs=500, after=""
) -> subprocess.CompletedProcess:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(batch=batch, epochs=epochs, after=after))
    return bench(f"--script={script}", *flags)


def bench(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "tfdist.launch.bench.main", "scaling", *flags],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd="/",
    )


# --- figures ---------------------------------------------------------------------------------------


def test_strong_scaling_by_hand():
    jobs = {
        1: [Job(10.0, 64), Job(12.0, 64)],
        2: [Job(5.5, 64), Job(6.0, 64)],
        4: [Job(4.0, 64), Job(4.0, 64)],
    }
    curve = Curve(False, jobs)
    assert curve.efficiencies(2) == pytest.approx([10 / 11, 1.0])
    assert curve.efficiencies(4) == pytest.approx([10 / 16, 12 / 16])
    # Medians 11, 5.75 and 4: the line through (1, 11), (1/2, 5.75) and (1/4, 4) is 1.375 + 9.5 / n.
    share = curve.serial()
    assert share.value == pytest.approx(1.375 / 10.875) and share.low < 0.1 < 0.15 < share.high
    assert "Amdahl's law, fitted to 3 numbers of ranks" in curve.table()


def test_weak_scaling_by_hand():
    curve = Curve(True, {1: [Job(10.0, 64)], 4: [Job(12.5, 256)]})
    assert curve.efficiencies(4) == [0.8]
    assert "3.20" in curve.table() and "80.0%" in curve.table()
    # 4 - 3 s = 3.2.
    assert "Gustafson's law, solved for 1 and 4 ranks: serial share 26.7%." in curve.table()


def test_shares_that_no_law_has_are_said_to_be_so():
    slower = Curve(False, {1: [Job(10.0, 64)], 2: [Job(12.0, 64)]}).law()
    assert "serial share 140.0%: above 100%" in slower
    faster = Curve(False, {1: [Job(10.0, 64)], 2: [Job(4.0, 64)]}).law()
    assert "serial share -20.0%: below 0%" in faster


def test_the_smallest_job_stands_in_for_one_rank():
    curve = Curve(False, {2: [Job(10.0, 64)], 8: [Job(3.125, 64)]})
    assert curve.efficiencies(8) == [0.8] and curve.serial() is None
    assert "compared with 2 ranks" in curve.table()


def test_ranks_that_share_cores_are_marked_and_not_fitted():
    jobs = {1: [Job(10.0, 64)], 2: [Job(5.5, 64)], 4: [Job(40.0, 64)]}
    curve = Curve(False, jobs, frozenset({4}))
    assert (
        "4 *" in curve.table() and "solved for 1 and 2 ranks: serial share 10.0%" in curve.table()
    )


def test_predictions_and_shares_stand_beside():
    one, two = Job(10.0, 64, 0.0, predicted=10.0), Job(5.5, 64, 0.25, predicted=6.25)
    text = Curve(False, {1: [one], 2: [two]}).table()
    assert "25.0%" in text and "80.0%" in text and "1.60" in text
    why = Job(5.5, 64, unpredicted="It is no chain.")
    assert "No prediction: It is no chain." in Curve(False, {1: [one], 2: [why]}).table()


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "requires either --script"),
        (["--model=gpt", "--script=a.py"], "requires either --script"),
        (["--script=/none.py"], "--script"),
        (["--model=gpt", "--ranks=2"], "--ranks must be two or more numbers"),
        (["--model=gpt", "--ranks=0,2"], "--ranks must be two or more numbers"),
        (["--model=gpt", "--ranks=1,x"], "--ranks must be two or more numbers"),
        (["--model=gpt", "--machine=/none.json"], "--machine"),
        (["--model=gpt", "--picture=a.txt"], "--picture"),
        (["--model=gpt", "-H=a:1,b:1", "--threads=2"], "--threads"),
    ],
)
def test_bad_flags_are_one_line(flags, said):
    done = bench(*flags)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("tfdist-bench: ") and said in line


def test_a_batch_that_nobody_gives(tmp_path):
    (tmp_path / "train.py").write_text("")
    done = bench(f"--script={tmp_path}/train.py --batch={{batch}}")
    assert done.returncode == 2 and "requires --batch" in done.stderr


# --- on ranks --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
def test_a_script_of_ten_lines(tmp_path, engine):
    skip_without(engine)
    found, drawn = tmp_path / "scaling.json", tmp_path / "scaling.png"
    flags = ["--ranks=1,2", "--rounds=2", "--batch=64", f"--engine={engine}"]
    done = scaling(
        tmp_path, *flags, f"--json={found}", f"--picture={drawn}", batch=FROM_VARIABLE, after="1/0"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Strong scaling: the same rows per update" in done.stdout
    assert "Weak scaling: the same rows per rank" in done.stdout
    assert "Amdahl's law, solved for 1 and 2 ranks" in done.stdout
    assert "No prediction" not in done.stdout
    assert drawn.read_bytes().startswith(b"\x89PNG")
    curves = json.loads(found.read_text())
    for name, rows in (("strong", [64, 64]), ("weak", [64, 128])):
        jobs = [curves[name]["ranks"][n]["jobs"] for n in ("1", "2")]
        assert [each[0]["rows"] for each in jobs] == rows
        assert all(len(each) == 2 for each in jobs)
        assert all(job["predicted"] > 0 for each in jobs for job in each)
        one, two = (statistic["step_seconds"] for statistic in curves[name]["ranks"].values())
        assert one > 0 and two > 0
        assert jobs[1][0]["communication"] > 0
    # The planner's step of one rank is the one that was measured.
    first = curves["strong"]["ranks"]["1"]["jobs"][0]
    assert first["predicted"] == pytest.approx(first["seconds"], rel=0.01)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
def test_a_script_with_a_batch_of_each_rank_scales_weakly(tmp_path):
    batch = '32 * int(os.environ.get("HOROVOD_SIZE", 1))'
    done = scaling(tmp_path, "--rounds=1", "--engine=horovod", batch=batch)
    assert done.returncode == 0, done.stderr
    assert "this is weak scaling" in done.stderr
    assert "Weak scaling" in done.stdout and "Strong scaling" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
def test_a_script_that_ignores_the_batch_scales_strongly(tmp_path):
    done = scaling(tmp_path, "--rounds=1", "--batch=64")
    assert done.returncode == 0, done.stderr
    assert "only strong scaling is measured" in done.stderr and "Weak" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize(
    ("epochs", "after", "said"),
    [
        (1, "", "did not run 5 + 20 steps of a Keras `fit`"),
        (1, "raise OSError('my disk')", "with exit code 1: "),
    ],
)
def test_a_script_that_ends_too_soon(tmp_path, epochs, after, said):
    done = scaling(tmp_path, "--rounds=1", epochs=epochs, after=after)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert said in line and ("my disk" in line) == bool(after)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
def test_the_fit_that_is_timed_is_that_of_the_strategy(tmp_path):
    """It alone refuses XLA on ranks."""
    again = "model.compile('adam', 'mse', jit_compile=True)\nmodel.fit(x, x, epochs=50, verbose=0)"
    done = scaling(tmp_path, "--rounds=1", "--engine=tensorflow", epochs=1, after=again)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "failed on 2 ranks" in line and "XLA cannot compile collectives" in line


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("model", ["convnet", "gpt"])
def test_reference_models(model):
    done = bench(f"--model={model}", "--rounds=1", "--steps=8")
    assert done.returncode == 0, done.stderr
    assert "Strong" in done.stdout and "Weak" in done.stdout and "No prediction" not in done.stdout
