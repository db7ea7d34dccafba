"""A training by DiLoCo, of which a rank dies in the first run: `job.py FOLDER STEP`; 0: none does."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.addons.slow_links.local_sgd import programs

SYNC_EVERY, EPOCHS, BATCH, ROWS = 5, 4, 12, 84

folder, dies_at = Path(sys.argv[1]), int(sys.argv[2])
tf.config.threading.set_intra_op_parallelism_threads(1)
strategy = tfdist.strategies.auto(watchdog_seconds=60.0, deterministic=True)
rank = strategy.mesh.rank
is_first = not (folder / f"begun-{rank}").exists()
(folder / f"begun-{rank}").touch()


class Steps(keras.callbacks.Callback):
    """Counts the steps that this rank has made; a SIGKILL before one of them."""

    def on_train_batch_begin(self, batch, logs=None):
        step = int(self.model.optimizer.iterations) + 1
        if is_first and rank == 1 and step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if strategy.is_chief:
            with open(folder / "steps", "a") as file:
                file.write(f"{step}\n")


keras.utils.set_random_seed(3)
with strategy.scope():
    model = programs.build()
    model.compile(
        tfdist.addons.slow_links.DiLoCo("adamw", SYNC_EVERY), "sparse_categorical_crossentropy"
    )
x, y = programs.rows(ROWS)
# Of a save that is still under way when a rank dies nothing is left.
saver = tfdist.callbacks.Checkpointer(folder / "saved", every_steps=SYNC_EVERY, asynchronous=False)
model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[saver, Steps()])
np.savez(folder / f"end-{rank}.npz", *model.get_weights())
