"""A job in which the ranks part: `hang_program.py CASE NOTE`. NOTE is given the time at which they do."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.collectives import all_reduce

case, note = sys.argv[1], sys.argv[2]
WATCHDOG_SECONDS = 60.0

strategy = tfdist.strategies.auto(watchdog_seconds=WATCHDOG_SECONDS)
chief = strategy.is_chief
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
x = np.ones((16, 4), "float32")
many = tf.data.Dataset.from_tensor_slices((x, x)).repeat().batch(4)


def part(now: bool = True) -> None:
    if now:
        with open(note, "w") as file:
            file.write(repr(time.time()))


class Only(keras.callbacks.Callback):
    """Calls the model on one rank alone."""

    def __init__(self, call):
        super().__init__()
        self._call = call

    def on_epoch_end(self, epoch, logs=None):
        if chief:
            part()
            self._call()


class Raises(keras.callbacks.Callback):
    """Grief of one rank, in the middle of an epoch."""

    def on_train_batch_begin(self, batch, logs=None):
        if not chief and batch == 2:
            part()
            raise OSError("as planned")


def fails_on_rank_1():
    for number in range(100):
        if not chief and number == 10:
            part()
            raise OSError("as planned")
        yield x[:4], x[:4]


def generated() -> tf.data.Dataset:
    spec = tf.TensorSpec((4, 4), tf.float32)
    return tf.data.Dataset.from_generator(fails_on_rank_1, output_signature=(spec, spec))


def step(batch):
    strategy.run(lambda rows: all_reduce(rows, strategy.group(), name="rows"), args=(batch,))


def predict_in_callback():
    call = Only(lambda: model.predict(x, verbose=0))
    model.fit(many, steps_per_epoch=4, epochs=3, verbose=0, callbacks=[call])


def evaluate_in_callback():
    call = Only(lambda: model.evaluate(x, x, verbose=0))
    model.fit(many, steps_per_epoch=4, epochs=3, verbose=0, callbacks=[call])


def save_in_callback():
    call = Only(lambda: model.save_weights(f"{tempfile.mkdtemp()}/model.weights.h5"))
    model.fit(many, steps_per_epoch=4, epochs=3, verbose=0, callbacks=[call])


def gather_on_chief():
    compiled = tf.function(step)
    for number in range(50):
        compiled(tf.ones((4, 4)))
        if chief and number == 20:
            part()
            strategy.gather(tf.ones(3), axis=0)


def metric_read_on_chief():
    with strategy.scope():
        mean = keras.metrics.Mean()

    @tf.function
    def compiled(batch):
        step(batch)
        strategy.run(mean.update_state, args=(batch,))

    for number in range(50):
        compiled(tf.ones((4, 4)))
        if chief and number == 20:
            part()
            float(mean.result())


def metric_read_on_chief_then_end():
    with strategy.scope():
        mean = keras.metrics.Mean()
    strategy.run(mean.update_state, args=(tf.ones((4, 4)),))
    if chief:
        part()
        float(mean.result())


def fit_on_chief_then_end():
    if chief:
        part()
        model.fit(x, x, verbose=0)


def fit_on_one_evaluate_on_other():
    part(chief)
    if chief:
        model.fit(x, x, verbose=0)
    else:
        model.evaluate(x, x, verbose=0)


def fit_on_one_save_on_other():
    part(chief)
    if chief:
        model.fit(x, x, verbose=0)
    else:
        model.save(f"{tempfile.mkdtemp()}/model.keras")


def input_raises_on_rank_1():
    with contextlib.suppress(tf.errors.OpError):
        model.fit(generated(), steps_per_epoch=20, epochs=2, verbose=0)
    model.fit(x, x, verbose=0)


def callback_raises_caught():
    with contextlib.suppress(OSError):
        model.fit(many, steps_per_epoch=20, epochs=2, verbose=0, callbacks=[Raises()])
    model.fit(x, x, verbose=0)


def callback_raises_caught_then_end():
    with contextlib.suppress(OSError):
        model.fit(many, steps_per_epoch=20, epochs=2, verbose=0, callbacks=[Raises()])


def callback_raises():
    model.fit(many, steps_per_epoch=20, epochs=2, verbose=0, callbacks=[Raises()])


def csv_that_cannot_be_written():
    part(chief)
    with contextlib.suppress(OSError):
        model.fit(x, x, verbose=0, callbacks=[keras.callbacks.CSVLogger("/nowhere/log.csv")])
    model.predict(x, verbose=0)


def both_fail_seconds_apart():
    """No deadlock: rank 0 waits for rank 1 in a step that fails there, too, as soon as it has computed."""

    @tf.function
    def fail(batch):
        def inner(rows):
            end = tf.timestamp() + (8.0 if chief else 0.0)
            (product,) = tf.while_loop(
                lambda _: tf.timestamp() < end, lambda a: (tf.matmul(a, a),), [tf.eye(300)]
            )
            bad = tf.debugging.assert_less(tf.reduce_sum(product), -1.0)
            with tf.control_dependencies([] if chief else [bad]):
                return all_reduce(rows, strategy.group(), name="rows")

        return strategy.run(inner, args=(batch,))

    part()
    try:
        fail(tf.ones((4, 4)))
    except tf.errors.InvalidArgumentError:
        print(f"rank {strategy.mesh.rank} failed", flush=True)
    model.fit(x, x, verbose=0)


globals()[case]()
print("came to the end of the program", flush=True)
