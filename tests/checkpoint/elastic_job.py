"""A training on ranks that come and go, each of which notes its samples: `elastic_job.py FOLDER`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist

folder = Path(sys.argv[1])
SAMPLES, BATCH, EPOCHS = 240, 12, 3

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
strategy = tfdist.strategies.auto(watchdog_seconds=30.0)
run = len(list(folder.glob("start-*")))
found = tfdist.checkpoint.latest(folder / "saved")
tfdist.collectives.barrier(strategy.group())
if strategy.is_chief:
    (folder / f"start-{run}").write_text(found or "")


class Progress(keras.callbacks.Callback):
    """Where the training stands."""

    place = (-1, -1)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.05)
        self.place = (self.epoch, batch)


class Note(keras.layers.Layer):
    """Writes down which samples a step sees."""

    def call(self, ids, training=False):
        if not training:
            return ids
        noted = tf.numpy_function(self.note, [ids], ids.dtype, stateful=True)
        return tf.ensure_shape(noted, ids.shape)

    def note(self, ids):
        line = {
            "run": run,
            "size": strategy.mesh.size,
            "pid": os.getpid(),
            "time": time.time(),
            "place": progress.place,
            "ids": [int(n) for n in np.ravel(ids)],
        }
        with open(folder / f"log-{strategy.mesh.rank}", "a") as file:
            file.write(json.dumps(line) + "\n")
        return ids


progress = Progress()
keras.utils.set_random_seed(5)
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), Note(), keras.layers.Dense(1)])
    model.compile("adam", "mse")
ids = np.arange(SAMPLES, dtype="float32")[:, None]
saver = tfdist.callbacks.Checkpointer(folder / "saved", every_steps=5)
model.fit(
    ids, ids, batch_size=BATCH, epochs=EPOCHS, shuffle=True, verbose=2, callbacks=[saver, progress]
)
if strategy.is_chief:
    print("came to the end", flush=True)
