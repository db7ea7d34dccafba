"""Trains a table under a limit of memory for each rank: `embedding_memory.py PLACEMENT MIB`."""

from __future__ import annotations

import resource
import sys

import keras
import numpy as np
import psutil
import tensorflow as tf

import tfdist
from tfdist.addons.recommenders import FeatureConfig, ShardedEmbedding, TableConfig

placement, mebibytes = sys.argv[1], int(sys.argv[2])
#: 512 MiB, and as much for the optimizer's state.
ROWS, WIDTH = 1 << 23, 16

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(2)
strategy = tfdist.strategies.auto()


def train(rows: int) -> list[float]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        ids = keras.Input((3,), dtype="int32", name="ids")
        table = TableConfig("table", rows, WIDTH, placement=placement)
        vectors = ShardedEmbedding([FeatureConfig("ids", table)])({"ids": ids})["ids"]
        model = keras.Model({"ids": ids}, keras.layers.Dense(1)(vectors))
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
    chance = np.random.default_rng(0)
    x = {"ids": chance.integers(0, rows, (64, 3)).astype("int32")}
    y = chance.normal(size=(64, 1)).astype("float32")
    return model.fit(x, y, batch_size=64, epochs=5, shuffle=False, verbose=0).history["loss"]


# What TensorFlow and the engine take for themselves is not what is limited.
train(64)
limit = psutil.Process().memory_info().data + (mebibytes << 20)
before = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
losses = train(ROWS)
resource.setrlimit(resource.RLIMIT_DATA, before)
if strategy.is_chief:
    print("losses", *losses, flush=True)
