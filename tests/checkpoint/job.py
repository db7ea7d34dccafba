"""A training that is killed now and then: `job.py FOLDER KIND MESH KILLS`.

KILLS is a JSON list of [step, phase, rank]: what happens in the first run, in the second, and so on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import keras
import tensorflow as tf

import tfdist
from tests.checkpoint.resume_programs import (
    BATCH,
    build_experts,
    build_gpt,
    build_perceptron,
    build_recommender,
)
from tfdist.checkpoint.manifest import Manifest
from tfdist.checkpoint.storage import Storage

folder, kind, mesh = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
kills = json.loads(sys.argv[4])
EPOCHS, BATCHES = 3, 20

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
zero_stage = mesh.pop("zero_stage", 0)
strategy = tfdist.strategies.auto(
    tfdist.Mesh(**mesh), zero_stage=zero_stage, watchdog_seconds=30.0, deterministic=True
)
rank = strategy.mesh.rank
run = len(list(folder.glob(f"run-*-of-{rank}")))
(folder / f"run-{run}-of-{rank}").touch()
step, phase, victim = kills[run] if run < len(kills) else (None, None, None)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Kill(keras.callbacks.Callback):
    """SIGKILL at the beginning of a step, or somewhere in it."""

    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.05)  # So that a save can be met while it is under way.
        if rank != victim or step is None:
            return
        if int(self.model.optimizer.iterations) + 1 < step:
            return
        if phase == "step":
            die()
        if phase == "mid-step":
            threading.Timer(0.003, die).start()
        armed.set()


#: From the chosen step on the next save is the last.
armed = threading.Event()


def killing(original, where: str):
    def function(*args, **kwargs):
        if armed.is_set() and phase == where:
            die()
        return original(*args, **kwargs)

    return function


mock.patch.object(Storage, "write", killing(Storage.write, "save")).start()
mock.patch.object(Manifest, "write", killing(Manifest.write, "manifest")).start()

keras.utils.set_random_seed(3)
with strategy.scope():
    builders = {
        "perceptron": build_perceptron,
        "gpt": build_gpt,
        "recommender": build_recommender,
        "experts": build_experts,
    }
    model, data = builders[kind](rows=BATCHES * BATCH)
saved = os.environ.get("SAVED", str(folder / "saved"))
saver = tfdist.callbacks.Checkpointer(saved, every_steps=3, keep_last=3)
model.fit(
    *data, batch_size=BATCH, epochs=EPOCHS, shuffle=True, verbose=0, callbacks=[saver, Kill()]
)
if strategy.is_chief:
    print("came to the end", flush=True)
