"""Trackers: two ranks write one run, and a restarted job goes on in it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest

import tfdist
from tests.conftest import skip_without
from tests.launch.processes import BIN

ROOT = Path(__file__).parents[3]
#: 12 updates in each of 4 epochs.
STEPS = [12, 24, 36, 48]
#: After the log of the second epoch, and before the checkpoint of step 32.
KILL = 28


def run_job(folder: Path, kind: str, kill: int) -> None:
    skip_without("horovod")
    variables = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    job = subprocess.run(
        [
            *(os.path.join(BIN, "tfdist-run"), "-np=2", "--max_restarts=1", "--restart_seconds=1"),
            *(
                "--",
                sys.executable,
                "-m",
                "tests.addons.trackers.job",
                str(folder),
                kind,
                str(kill),
            ),
        ],
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert job.returncode == 0, job.stdout[-4000:] + job.stderr[-2000:]
    assert ("SIGKILL" in job.stderr) == (kill > 0)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [-1, KILL])
def test_mlflow(tmp_path, kill):
    mlflow = pytest.importorskip("mlflow")
    run_job(tmp_path, "mlflow", kill)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (found,) = client.search_runs(["0"])
    assert found.info.run_id == (tmp_path / "run").read_text() and found.info.status == "FINISHED"
    assert found.info.run_name == "digits"
    assert found.data.params["ranks"] == "2" and json.loads(found.data.params["layers"]) == [4, 1]
    assert json.loads(found.data.params["mesh"])["data"] == 2
    assert found.data.params["rate"] == "0.5" and str(tmp_path) in found.data.params["folder"]
    every = list(range(2, 49, 2))
    for name, steps in (("train/loss", every), ("validation/loss", STEPS), ("epoch", STEPS)):
        history = client.get_metric_history(found.info.run_id, name)
        assert sorted(metric.step for metric in history) == steps
    assert history[-1].value == 4


def records(file: Path) -> Iterator[bytes]:
    """The records of a file of wandb: 7 bytes, then blocks of 32 KiB as in LevelDB's logs."""
    data, found = file.read_bytes(), b""
    for begin in range(0, len(data), 1 << 15):
        block = data[begin : begin + (1 << 15)]
        at = 7 if begin == 0 else 0
        while at + 7 <= len(block):
            length, kind = struct.unpack_from("<HB", block, at + 4)
            found += block[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # A whole record, or the last part of one.
                yield found
                found = b""


@pytest.mark.slow
@pytest.mark.parametrize("kill", [-1, KILL])
def test_wandb(tmp_path, kill):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    run_job(tmp_path, "wandb", kill)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == (2 if kill > 0 else 1)
    ids, steps = set(), []
    for data in (data for file in files for data in records(file)):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            ids.add(record.run.run_id)
        if record.WhichOneof("record_type") == "history":
            steps.append(record.history.step.num)
    assert ids == {(tmp_path / "run").read_text()}
    assert set(steps) == set(range(2, 49, 2)), steps


@pytest.mark.slow
@pytest.mark.parametrize("kill", [-1, KILL])
def test_trackio(tmp_path, kill, monkeypatch):
    pytest.importorskip("trackio")
    run_job(tmp_path, "trackio", kill)
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as storage; "
        "(run,) = storage.get_runs('digits'); print(run); "
        "print(json.dumps([line['step'] for line in storage.get_logs('digits', run)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio")},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    name, steps = done.stdout.strip().splitlines()[-2:]
    assert name == (tmp_path / "run").read_text() and json.loads(steps) == STEPS


class Recorder(tfdist.addons.trackers.Tracker):
    """Keeps what it gets."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = []

    def start(self, config, run):
        self.calls.append(("start", config, run))
        return run or "run-1", -1

    def log(self, metrics, step):
        self.calls.append(("log", metrics, step))

    def end(self, failed):
        self.calls.append(("end", failed))


class Fails(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise KeyError("x")


def fitted(recorder, *callbacks, epochs=2):
    with tfdist.strategies.LocalStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((12, 2), "float32")
    model.fit(x, x[:, :1], batch_size=4, epochs=epochs, verbose=0, callbacks=[recorder, *callbacks])


def test_what_a_tracker_gets():
    recorder = Recorder(config={"seed": 3}, every_steps=2)
    fitted(recorder)
    (begin, config, run), *logs, end = recorder.calls
    assert begin == "start" and run is None and end == ("end", False)
    assert config["seed"] == 3 and config["ranks"] == 1 and config["optimizer"].startswith("sgd")
    assert config["versions"]["keras"] == keras.__version__
    assert [step for _, _, step in logs] == [2, 3, 5, 6]
    assert set(logs[0][1]) == {"train/loss"} and set(logs[1][1]) == {"train/loss", "epoch"}


def test_a_tracker_of_several_models():
    """As in cross-validation: a run for each, with all of its steps."""
    recorder = Recorder()
    for _ in range(2):
        fitted(recorder)
        (_, _, run), *logs, end = recorder.calls
        assert run is None and [step for _, _, step in logs] == [3, 6] and end == ("end", False)
        recorder.calls.clear()


def test_the_end_of_an_epoch_at_a_logged_step():
    """3 steps in each epoch."""
    recorder = Recorder(every_steps=1)
    fitted(recorder)
    logs = [(set(metrics), step) for _, metrics, step in recorder.calls[1:-1]]
    epochs = [({"train/loss"}, 1), ({"train/loss"}, 2), ({"train/loss"}, 3), ({"epoch"}, 3)]
    assert logs == epochs + [(names, step + 3) for names, step in epochs]


def test_calls_of_several_batches_are_logged_in_time():
    recorder = Recorder(every_steps=3)
    with tfdist.strategies.LocalStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=4)
    x = np.ones((16, 2), "float32")
    model.fit(x, x[:, :1], batch_size=1, epochs=2, verbose=0, callbacks=[recorder])
    logs = [step for _, metrics, step in recorder.calls[1:-1] if "train/loss" in metrics]
    assert logs == [4, 8, 12, 16, 20, 24, 28, 32]


def test_a_run_is_that_of_its_tracker(tmp_path):
    """A restarted job that has another tracker too."""

    class Other(Recorder):
        name = "other"

    fitted(Recorder(), tfdist.callbacks.Checkpointer(tmp_path))
    other, recorder = Other(), Recorder()
    fitted(other, recorder, tfdist.callbacks.Checkpointer(tmp_path), epochs=3)
    assert other.calls[0][2] is None and recorder.calls[0][2] == "run-1"


def test_the_names_of_the_trackers():
    for package in ("mlflow", "wandb", "trackio"):
        pytest.importorskip(package)
    trackers = tfdist.addons.trackers
    assert len({each.name for each in (trackers.MLflow, trackers.WandB, trackers.Trackio)}) == 3


def test_a_failed_training_is_told():
    recorder = Recorder()
    with pytest.raises(KeyError):
        fitted(recorder, Fails())
    assert recorder.calls[-1] == ("end", True)


@pytest.mark.parametrize(
    ("options", "error"), [({"config": [1]}, TypeError), ({"every_steps": 0}, ValueError)]
)
def test_wrong_arguments(options, error):
    with pytest.raises(error, match=next(iter(options))):
        Recorder(**options)
