"""How often `Checkpointer(every="auto")` saves in a `fit`."""

from __future__ import annotations

import itertools
import statistics
import time

import keras
import numpy as np
import pytest

import tfdist
from tfdist.callbacks import Checkpointer
from tfdist.checkpoint import checkpointer, saving
from tfdist.checkpoint.manifest import Manifest


class Clock:
    """A clock that stands still but for what the test adds: other load on the machine has no effect."""

    sleep = staticmethod(time.sleep)

    def __init__(self):
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


class Noting(Checkpointer):
    """A Checkpointer that notes when its saves begin and end."""

    def __init__(self, clock, *args, **options):
        super().__init__(*args, asynchronous=False, **options)
        self.clock = clock
        self.saves: list[tuple[float, float]] = []

    def _save(self, epoch, batch):
        begin = self.clock.now
        super()._save(epoch, batch)
        self.saves.append((begin, self.clock.now))


@pytest.mark.slow
def test_auto_saves_at_daly_s_interval(tmp_path, monkeypatch):
    write, clock = Manifest.write, Clock()

    def slowly(manifest, storage):
        write(manifest, storage)
        clock.now += 0.2

    def compute(batch, logs):
        clock.now += 0.01

    monkeypatch.setattr(Manifest, "write", slowly)
    monkeypatch.setattr(checkpointer, "time", clock)
    monkeypatch.setattr(saving, "time", clock)
    saver = Noting(clock, tmp_path, every="auto", failure_seconds=4.0)
    step = keras.callbacks.LambdaCallback(on_train_batch_end=compute)
    with tfdist.strategies.LocalStrategy().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((900, 2), "float32")
    model.fit(x, x[:, :1], batch_size=1, verbose=0, callbacks=[step, saver])
    *saves, _ = saver.saves  # The last is that of the end.
    between = [begin - end for (_, end), (begin, _) in itertools.pairwise(saves[1:])]
    assert len(between) >= 4
    # Daly 2006, equation 37, of 0.2 s and 4 s, by hand: sqrt(1.6) (1 + sqrt(0.025) / 3 + 0.025 / 9) - 0.2,
    # to half a step.
    assert statistics.median(between) == pytest.approx(1.135, abs=0.0051)
