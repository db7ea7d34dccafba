"""A bit of a weight flips on one rank: it is found, and the steps since the last look are run again.

    python examples/silent_errors.py
    tfdist-run -np 2 -- python examples/silent_errors.py

Every 5 steps ranks compare checksums of what they hold alike. Here rank 1 spoils a weight once; the warning names
variable and rank, and the training ends where it would have ended. Needs scikit-learn, which carries the images:
pip install 'tfdist[data]'.
"""

import keras
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)

digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target

with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    model.compile(
        keras.optimizers.SGD(0.2), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )


# Rank 0 of one process has nobody to compare with, so it is left alone.
fault = tfdist.testing.faults.FlipBit(rank=1, step=33, variable="bias", bit=30)
watch = tfdist.callbacks.VerifyModelSync(every_steps=5)
history = model.fit(x, y, batch_size=100, epochs=4, verbose=0, callbacks=[watch, fault])
if strategy.is_chief:
    print(f"Loss {history.history['loss'][-1]:.4f} on {strategy.mesh.size} rank(s).")
