"""A hook around `fit` of one's own: a run's parameters, figures and end, as trackers of experiments log them."""

from __future__ import annotations

import contextlib
import json

import keras
import numpy as np
import pytest

import tfdist
from tests.conftest import on_ranks
from tfdist.extend import FitHook


class RunLog(FitHook):
    """Writes a line of JSON for what a run is, for each epoch, and for how it ended; on the chief."""

    def __init__(self, path):
        self._path = path
        self.traced_steps = 0

    @contextlib.contextmanager
    def around(self, fit):
        """From the parameters of the run to its end."""
        self._writes = fit.strategy.is_chief
        self._write(run=fit.kind, epochs=fit.arguments.get("epochs"), ranks=fit.strategy.mesh.size)
        log = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: self._write(epoch=epoch, **logs)
        )
        fit.arguments["callbacks"] = [*fit.callbacks, log]
        try:
            yield
        except BaseException as error:
            self._write(status="FAILED", error=type(error).__name__)
            raise
        self._write(status="FINISHED")

    @contextlib.contextmanager
    def around_step(self, step):
        """Counts how many graphs are made of the training step."""
        yield
        self.traced_steps += step.kind == "train" and "loss" in step.outputs

    def explain(self, fit, error):
        """Where to look."""
        return f"The run is logged in {self._path}."

    def _write(self, **line):
        if self._writes:
            with open(self._path, "a") as file:
                file.write(json.dumps(line) + "\n")


class Fails(keras.callbacks.Callback):
    """Raises in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise KeyError("no such thing")


def run(path):
    strategy = tfdist.testing.strategy(tfdist.Mesh())
    hook = RunLog(path)
    strategy.fit_hooks.append(hook)
    try:
        with strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = np.ones((8, 3), "float32")
        model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
        traced = hook.traced_steps
        model.fit(x, x[:, :1], batch_size=4, epochs=1, verbose=0)
        with pytest.raises(KeyError) as caught:
            model.fit(x, x[:, :1], batch_size=4, epochs=3, verbose=0, callbacks=[Fails()])
    finally:
        strategy.fit_hooks.remove(hook)
    return traced, hook.traced_steps, caught.value.__notes__


@on_ranks(("horovod", 2))
def test_a_run_is_logged_from_begin_to_end(pool, tmp_path):
    path = f"{tmp_path}/run.jsonl"
    for traced, in_the_end, notes in pool.run(run, path, timeout=120):
        # The hook is the same in all calls, and so is the graph.
        assert 0 < traced == in_the_end
        assert notes == [f"The run is logged in {path}."]
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    assert lines[0] == {"run": "fit", "epochs": 2, "ranks": 2}
    assert [line["epoch"] for line in lines if "epoch" in line] == [0, 1, 0, 0]
    assert all(line["loss"] >= 0 for line in lines if "loss" in line)
    ends = [line["status"] for line in lines if "status" in line]
    assert ends == ["FINISHED", "FINISHED", "FAILED"] and lines[-1]["error"] == "KeyError"
