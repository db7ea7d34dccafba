"""The `train.py` that documents start: a small model under the strategy of the launcher."""

import keras
import numpy as np

import tfdist

strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).random((10, 4), dtype="float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x.sum(axis=1), batch_size=4, verbose=0)
if strategy.is_chief:
    print(f"Trained on {strategy.mesh.size} rank(s).")
