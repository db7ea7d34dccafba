"""The first run: what `make demo` prints, its summary, and the picture of its curves."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess

import pytest

from tests.launch.processes import BIN
from tfdist.launch.flags.values import UsageError
from tfdist.launch.train import curves
from tfdist.launch.train.fitting import summary

#: What the lines of a training look like: epochs, their bars and logs, and the last words.
_TRAINING = re.compile(
    r"\[0\] (Epoch \d+/\d+$|\d+/\d+ .*loss: |Trained \d+ epoch|Curves: |Test accuracy )"
)


@pytest.mark.timeout(200)
def test_the_demonstration_says_little_beside_the_training(tmp_path):
    runner = [os.path.join(BIN, "tfdist-run"), "-np=2", "--"]
    picture = tmp_path / "curves.png"
    train = [os.path.join(BIN, "tfdist-train"), "--epochs=2", f"--plot={picture}", "--threads=1"]
    environment = {
        name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"
    }
    job = subprocess.run(
        [*runner, *train, "--model=mlp", "--verbose=1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert job.returncode == 0, job.stdout
    lines = job.stdout.splitlines()
    other = [line for line in lines if not _TRAINING.match(line)]
    assert len(other) <= 5, "\n".join(other)
    assert "\x1b" not in job.stdout
    # A line an epoch; more only where one takes ten seconds.
    assert len([line for line in lines if re.match(r"\[0\] \d+/\d+ ", line)]) <= 8, job.stdout
    assert "Trained 2 epochs in " in job.stdout and "peak memory of this rank" in job.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_summary_names_the_best_epoch():
    said = summary({"loss": [3.0, 2.0, 1.0], "val_loss": [3.0, 1.5, 2.0]}, 75.2)
    assert said.startswith(
        "Trained 3 epochs in 1 min 15 s; best validation loss 1.5000 in epoch 2; "
    )
    assert summary({}, 0.5).startswith("Trained 0 epochs in 0.5 s; peak memory")


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_curves_are_drawn(tmp_path, ending):
    file = tmp_path / f"curves.{ending}"
    logs = {"loss": [1.0, float("nan"), 0.5], "val_loss": [1, 2, 3], "accuracy": [0.1, 0.2, 0.3]}
    curves.draw(logs, str(file), "mlp on digits, 2 rank(s)")
    assert file.stat().st_size > 1000


def test_without_matplotlib_a_plot_is_refused_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'tfdist\[plots\]'"):
        curves.check_plot("plot", str(tmp_path / "a.png"))
