"""Trains a classifier of handwritten digits, on one process or on many ranks.

    python examples/train_digits.py
    tfdist-run -np 2 -- python examples/train_digits.py

Both end with the same weights up to float rounding. Needs scikit-learn, which carries the images:
pip install 'tfdist[data]'.
"""

import keras
from sklearn.datasets import load_digits

import tfdist

# First of all: the ranks meet here, and get one random state.
strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)

digits = load_digits()
x, y = digits.images[..., None].astype("float32") / 16, digits.target
train, test = slice(0, 1400), slice(1400, None)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

# Every rank passes the whole arrays; 100 is the global batch.
model.fit(x[train], y[train], batch_size=100, epochs=8, verbose=2)
loss, accuracy = model.evaluate(x[test], y[test], verbose=0)
if strategy.is_chief:
    print(f"Accuracy {accuracy:.2%}, loss {loss:.4f}, on {strategy.mesh.size} rank(s).")
