"""Trains on all ranks, then the same in plain Keras on one, and compares the weights.

    python examples/same_as_one_process.py
    tfdist-run -np 2 -- python examples/same_as_one_process.py

Nothing in the second training knows of tfdist. Batches do not divide by the ranks, gradients are clipped by
their global norm and accumulated, and the batch normalization looks at the global batch. Needs scikit-learn:
pip install 'tfdist[data]'.
"""

import keras
import numpy as np
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.strategies.auto()

digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target


def train(synchronized):
    """The model after three epochs, and the loss of the last."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            # Plain Keras has only one process, and refuses to synchronize.
            keras.layers.BatchNormalization(synchronized=synchronized),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.SGD(
        0.05, momentum=0.9, global_clipnorm=1.0, gradient_accumulation_steps=2
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    # 1797 rows: the last batch has 18, and on four ranks they cannot have equally many.
    history = model.fit(x, y, batch_size=137, epochs=3, verbose=0)
    return model, history.history["loss"][-1]


with strategy.scope():
    model, loss = train(synchronized=True)

if strategy.is_chief:
    alone, loss_alone = train(synchronized=False)
    off = max(
        np.abs(ours - theirs).max()
        for ours, theirs in zip(model.get_weights(), alone.get_weights(), strict=True)
    )
    print(f"Weights differ by {off:.1e} at most.")
    print(f"Loss {loss:.4f}, in plain Keras {loss_alone:.4f}, on {strategy.mesh.size} rank(s).")
