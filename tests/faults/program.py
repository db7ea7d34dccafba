"""A small training run in which one rank comes to grief: `program.py FAULT PHASE RANK FILE`."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time

fault, phase, victim, note = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
WATCHDOG_SECONDS = 10.0


def come_to_grief() -> None:
    with open(note, "w") as file:
        file.write(repr(time.time()))
    if fault == "exception":
        raise RuntimeError("as planned")
    if fault == "held":
        # The process does not end before the thread does; the hook is the program's own.
        sys.excepthook = lambda *_: None
        threading.Thread(target=time.sleep, args=(60.0,)).start()
        raise RuntimeError("as planned")
    if fault == "leaving":
        sys.exit()
    os.kill(os.getpid(), getattr(signal, fault))


def this_rank() -> int:
    from tfdist.runtime.horovod_variables import started_by_horovod
    from tfdist.runtime.tf_config import started_by_tf_config

    started = started_by_horovod() or started_by_tf_config()
    if started is None:
        raise RuntimeError("tfdist-run starts this program.")
    return started[0]


import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import tfdist  # noqa: E402

is_victim = this_rank() == victim
if phase == "start-up" and is_victim:
    come_to_grief()

mesh = tfdist.Mesh(pipeline=2) if phase == "stage" else None
strategy = tfdist.strategies.auto(mesh, watchdog_seconds=WATCHDOG_SECONDS)


class Fault(keras.callbacks.Callback):
    epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        place = {"first-step": (0, 0), "mid-epoch": (1, 3), "compiled": (1, 3)}.get(phase)
        if is_victim and place == (self.epoch, batch):
            come_to_grief()


class Dense(keras.layers.Dense):
    """The chief's grief comes while it writes; another rank's while it waits for the file."""

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if phase == "save" and is_victim and strategy.is_chief:
            come_to_grief()


class Stage(keras.layers.Layer):
    """Grief between two micro-batches, in the middle of a stage's work."""

    calls = 0

    def call(self, inputs, training=False):
        if not training or not is_victim or fault == "non-finite":
            return inputs
        outputs = tf.numpy_function(self.pass_on, [inputs], inputs.dtype)
        outputs = tf.ensure_shape(outputs, inputs.shape)
        return inputs + tf.stop_gradient(outputs - inputs)

    def pass_on(self, inputs):
        self.calls += 1
        if self.calls == 8:
            come_to_grief()
        return inputs


class Save(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if phase == "save" and is_victim and not strategy.is_chief:
            come_to_grief()
        self.model.save_weights(os.path.join(folder, "model.weights.h5"))


keras.utils.set_random_seed(0)
folder = tempfile.mkdtemp()
with strategy.scope():
    layers = [keras.Input((8,)), Dense(8), keras.layers.Dense(1)]
    if phase == "stage":
        layers = [keras.Input((8,)), Dense(8), Stage(), Stage(), keras.layers.Dense(1)]
        model = tfdist.pipeline.PipelineModel(layers, num_microbatches=5, cut=[2, 2])
    else:
        model = keras.Sequential(layers)
    model.compile("sgd", "mse", jit_compile=phase == "compiled")
x = np.random.normal(size=(80, 8)).astype("float32")
callbacks = [Fault(), Save()]
if fault == "non-finite":
    # One bad sample, in the victim's rows of the fourth batch.
    x[35 if victim else 30] = np.nan
    callbacks = [tfdist.callbacks.TerminateOnNonFinite(steps=3)]
model.fit(x, x[:, :1], batch_size=10, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
if fault == "lateness" and is_victim:
    time.sleep(4.0)
print("came to the end of the program", flush=True)
