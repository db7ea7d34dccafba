"""Hogwild!: threads of one process that write shared parameters without locks, for sparse models.

    python examples/hogwild.py

Logistic regression on rows that touch few of many weights: two threads seldom write the same ones, so an epoch ends
at about the loss of one thread, and sooner where two cores are free (Niu et al. 2011). Ranks are not used.
"""

import time

import keras
import numpy as np
import tensorflow as tf

import tfdist

FEATURES, FIELDS, ROWS = 1_000_000, 16, 40_000

tf.config.threading.set_intra_op_parallelism_threads(1)  # An operation does not take all cores.
random = np.random.default_rng(0)
ids = random.integers(0, FEATURES, (ROWS, FIELDS), "int32")
labels = (random.normal(size=FEATURES)[ids].sum(axis=1) > 0).astype("float32")

losses = {}
for threads in (1, 2):
    strategy = tfdist.addons.asynchronous.HogwildStrategy(threads)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((FIELDS,), dtype="int32"),
                keras.layers.Embedding(FEATURES, 1, embeddings_initializer="zeros"),
                keras.layers.Flatten(),
                keras.layers.Dense(1, kernel_initializer="ones", use_bias=False, trainable=False),
            ]
        )
        model.compile(
            keras.optimizers.SGD(2.0),
            keras.losses.BinaryCrossentropy(from_logits=True),
            steps_per_execution=50,
        )
    begin = time.perf_counter()
    history = model.fit(ids, labels[:, None], batch_size=64, epochs=4, verbose=0)
    losses[threads] = history.history["loss"][-1]
    print(f"{threads} thread(s): {time.perf_counter() - begin:.1f} s")
print(f"Losses: one thread {losses[1]:.3f}, two threads {losses[2]:.3f}.")
