"""Trains under a limit of memory for each rank: `limited_memory.py STAGE MIB`."""

from __future__ import annotations

import resource
import sys

import keras
import psutil
import tensorflow as tf

import tfdist

stage, mebibytes = int(sys.argv[1]), int(sys.argv[2])
#: 128 MiB of parameters; with gradients and the state of Adam 512.
WIDTH, LAYERS = 2048, 8

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
strategy = tfdist.strategies.auto(zero_stage=stage, bucket_mib=1)


def train(width: int, layers: int, steps: int) -> list[float]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((width,))]
            + [keras.layers.Dense(width, use_bias=False, activation="tanh") for _ in range(layers)]
        )
        model.compile(keras.optimizers.Adam(1e-3), "mse")
    x = tf.random.normal([16, width])
    data = tf.data.Dataset.from_tensors((x, tf.tanh(x))).repeat()
    history = model.fit(data, steps_per_epoch=1, epochs=steps, verbose=0)
    return history.history["loss"]


# What TensorFlow and the engine take for themselves is not what is limited.
train(8, 2, 1)
limit = psutil.Process().memory_info().data + (mebibytes << 20)
before = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
losses = train(WIDTH, LAYERS, 5)
resource.setrlimit(resource.RLIMIT_DATA, before)
if strategy.is_chief:
    print("losses", *losses, flush=True)
