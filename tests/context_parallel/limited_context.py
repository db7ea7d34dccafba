"""Trains on a long sequence under a limit of memory for each rank."""

from __future__ import annotations

import resource

import keras
import numpy as np
import psutil
import tensorflow as tf

import tfdist

#: About 600 MiB of activations, for weights of 10.
TOKENS, WIDTH, LAYERS, MEBIBYTES = 4096, 256, 3, 320

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
strategy = tfdist.strategies.auto(tfdist.Mesh(data=1, context=-1), bucket_mib=1)


def train(width: int, layers: int, tokens: int, steps: int) -> list[float]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = tfdist.models.gpt(
            64, num_layers=layers, width=width, num_heads=4, positions="rotary"
        )
        loss = tfdist.layers.VocabParallelCrossEntropy(64)
        model.compile(keras.optimizers.SGD(0.3), loss)
    ids = np.arange(tokens + 1, dtype="int32")[None] * 7 % 64
    data = tf.data.Dataset.from_tensors((ids[:, :-1], ids[:, 1:])).repeat()
    return model.fit(data, steps_per_epoch=1, epochs=steps, verbose=0).history["loss"]


# What TensorFlow and the engine take for themselves is not what is limited.
train(16, 1, 64, 1)
limit = psutil.Process().memory_info().data + (MEBIBYTES << 20)
before = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
losses = train(WIDTH, LAYERS, TOKENS, 3)
resource.setrlimit(resource.RLIMIT_DATA, before)
if strategy.is_chief:
    print("losses", *losses, flush=True)
