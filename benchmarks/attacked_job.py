"""Trains the same few steps again and again until told to stop: `attacked_job.py FOLDER WIDTH`.

Each round begins with the same weights, so the last weights do not depend on the number of rounds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfdist
from tfdist.collectives.objects import broadcast_object

folder, width = Path(sys.argv[1]), int(sys.argv[2])
strategy = tfdist.strategies.auto(watchdog_seconds=10.0)
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(width),
            keras.layers.Dense(width),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
x = np.random.default_rng(0).normal(size=(400, 16)).astype("float32")
begin = model.get_weights()
world = strategy.group()
times: list[float] = []
rounds = 0


class Clock(keras.callbacks.Callback):
    """When each step ended."""

    def on_train_batch_end(self, batch, logs=None):
        """Notes it."""
        times.append(time.monotonic())  # One clock for all processes of a machine.


stop = False
while not stop:
    model.set_weights(begin)
    model.fit(x, x[:, :1], batch_size=10, verbose=0, shuffle=False, callbacks=[Clock()])
    rounds += 1
    if rounds == 3 and world.rank == 0:
        (folder / "under way").touch()
    stop = broadcast_object((folder / "stop").exists(), world, name="stop")
if world.rank == 0:
    np.savez(folder / "weights.npz", *model.get_weights())
    (folder / "times.json").write_text(json.dumps(times))
print(f"rank {os.getpid()} did {rounds} rounds", flush=True)
