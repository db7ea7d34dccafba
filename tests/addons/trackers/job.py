"""A training that a tracker logs, and that is killed once: `job.py FOLDER TRACKER KILL`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist

folder, kind, kill = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def make_tracker():
    """The tracker, which writes to the folder."""
    from tfdist.addons import trackers

    config = {"note": "a test", "layers": [4, 1], "rate": np.float32(0.5)}
    if kind == "mlflow":
        import mlflow

        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        config["folder"] = folder
        return trackers.MLflow(name="digits", config=config, every_steps=2)
    if kind == "wandb":
        return trackers.WandB(config=config, project="digits", dir=str(folder), every_steps=2)
    return trackers.Trackio("digits", config=config)


tf.config.threading.set_intra_op_parallelism_threads(1)
strategy = tfdist.strategies.auto(watchdog_seconds=60.0)
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")


class Kill(keras.callbacks.Callback):
    """SIGKILL in the first run."""

    def on_train_batch_begin(self, batch, logs=None):
        """A step begins."""
        once = folder / "killed"
        is_here = int(self.model.optimizer.iterations) == kill and strategy.mesh.rank == 1
        if is_here and not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)


random = np.random.default_rng(0)
x, y = random.normal(size=(96, 8)), random.normal(size=(96, 1))
tracker = make_tracker()
saver = tfdist.callbacks.Checkpointer(folder / "saved", every_steps=8)
model.fit(
    x.astype("float32"),
    y.astype("float32"),
    batch_size=8,
    epochs=4,
    validation_data=(x[:16].astype("float32"), y[:16].astype("float32")),
    verbose=0,
    callbacks=[saver, tracker, Kill()],
)
if strategy.is_chief:
    (folder / "run").write_text(str(tracker.run))
