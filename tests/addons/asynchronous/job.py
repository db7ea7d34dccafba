"""A worker of parameter servers, as `tfdist-run --ps` starts it: trains, and writes what it saw."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import numpy as np
import tensorflow as tf

import tfdist


class Watch(keras.callbacks.Callback):
    """Kills or holds this worker, and notes how far ahead each of its steps began."""

    def __init__(self, strategy, index: int, options: dict, folder: str):
        super().__init__()
        self._store = getattr(strategy, "_store", None)
        self._index, self._options, self._folder = index, options, folder
        self.ahead: list[int] = []
        self.begun = self.ended = 0.0

    def on_train_batch_begin(self, batch, logs=None):
        # The first step traces.
        self.begun = self.begun or (time.monotonic() if batch else 0.0)

    def on_train_batch_end(self, batch, logs=None):
        if self._store is not None:
            self.ahead.append(self._store._ahead)
        self.ended = time.monotonic()
        mark = os.path.join(self._folder, "killed")
        dies = self._index == self._options.get("dies") and len(self.ahead) == 8
        if dies and not os.path.exists(mark):
            with open(mark, "w"):
                os.kill(os.getpid(), signal.SIGKILL)
        with open(os.path.join(self._folder, f"steps{self._index}"), "w") as file:
            file.write(str(len(self.ahead)))
        held = self._options.get("held")
        if held and self._index == 0 and len(self.ahead) == 1:
            for worker in held["workers"]:
                wait_for(self._folder, worker, held["reached"])
        elif held and self._index in held["workers"] and len(self.ahead) == held.get("after"):
            wait_for(self._folder, 0, held["until"])


def wait_for(folder: str, worker: int, executions: int) -> None:
    """Returns when a worker has made so many executions of steps."""
    path = Path(folder, f"steps{worker}")
    while not path.exists() or int(path.read_text() or 0) < executions:
        time.sleep(0.01)


def held_in_data(dataset, folder: str, batch: int, executions: int):
    """The data set, which yields a batch when worker 0 has made so many executions of steps."""

    def hold(number):
        if number == batch:
            wait_for(folder, 0, executions)
        return np.int64(0)

    def element(number, data):
        with tf.control_dependencies([tf.numpy_function(hold, [number], tf.int64)]):
            return tf.nest.map_structure(tf.identity, data)

    return dataset.enumerate().map(element)


class Slow(keras.layers.Layer):
    """Takes its time, between the read of the parameters and the gradient."""

    def __init__(self, seconds: float):
        super().__init__()
        self._seconds = seconds

    def call(self, inputs):
        def sleep():
            time.sleep(self._seconds)
            return np.int64(0)

        with tf.control_dependencies([tf.numpy_function(sleep, [], tf.int64)]):
            return tf.identity(inputs)


def digits():
    """Images and labels to learn from, and to test on."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    held_out = np.arange(len(images)) % 5 == 4
    return (images[~held_out], labels[~held_out]), (images[held_out], labels[held_out])


def small_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(960, 16)).astype("float32")
    return x, (x @ rng.normal(size=16) > 0).astype("int32")


def main(folder: str, options: dict) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    if options.get("synchronous"):
        strategy = tfdist.strategies.auto()
        index = strategy.mesh.rank
    else:
        strategy = tfdist.addons.asynchronous.ParameterServerStrategy(
            max_staleness=options.get("staleness"),
            delay_compensation=options.get("compensation", 0.0),
            backup_ranks=options.get("backup"),
            speculative=options.get("speculative", False),
            worker_timeout_seconds=options.get("worker_timeout", options.get("timeout", 60.0)),
        )
        index = strategy.worker_index
    keras.utils.set_random_seed(0)
    if options.get("digits"):
        (x, y), held_out = digits()
    else:
        (x, y), held_out = small_data(), None
    with strategy.scope():
        seconds = options.get("step_seconds", 0.0) * (
            options.get("slower", 4) if index == options.get("slow") else 1
        )
        layers = [keras.Input(x.shape[1:]), Slow(seconds)]
        if options.get("digits"):
            layers += [
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.Conv2D(64, 3, activation="relu"),
                keras.layers.Flatten(),
                keras.layers.Dropout(0.4),
            ]
        layers += [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        model.compile(
            keras.optimizers.Adam(0.002) if options.get("digits") else keras.optimizers.SGD(0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=options.get("execution", 1),
        )
    watch = Watch(strategy, index, options, folder)
    batch_size = options.get("batch_size", 16)
    held = options.get("held", {})
    if index in held.get("workers", ()) and "batch" in held:
        # Of the data set before each worker takes its part.
        number = held["batch"] * strategy.num_workers + index
        x = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
        x, y, batch_size = held_in_data(x, folder, number, held["until"]), None, None
    history = model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=options["epochs"],
        verbose=0,
        callbacks=[watch],
    )
    found = {
        "steps": len(watch.ahead),
        "ahead": watch.ahead,
        "seconds": watch.ended - watch.begun,
        "history": history.history,
        "weights": float(sum(np.abs(weight).sum() for weight in model.get_weights())),
        "iterations": int(model.optimizer.iterations.numpy()),
    }
    if not options.get("synchronous"):
        found["updates"] = strategy.applied_updates().tolist()
        found["dropped"] = strategy.dropped_gradients().tolist()
        found["redone"] = strategy.redone_gradients().tolist()
    if held_out is not None and index == 0:
        found["accuracy"] = model.evaluate(*held_out, verbose=0, return_dict=True)["accuracy"]
    np.savez(os.path.join(folder, f"weights{index}.npz"), *model.get_weights())
    path = os.path.join(folder, f"worker{index}.json")
    with open(path, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
