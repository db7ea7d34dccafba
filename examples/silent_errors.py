"""A bit of a weight flips on one rank: it is found, and the steps since the last look are run again.

    python examples/silent_errors.py
    tfdist-run -np 2 -- python examples/silent_errors.py

Every 5 steps ranks compare checksums of what they hold alike. Here the last rank, if there are several, spoils a weight
of its own once; the warning names variable and rank, and the training ends where it would have ended. Needs
scikit-learn, which carries the images: pip install 'tfdist[data]'.
"""

import keras
import numpy as np
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


class FlipBit(keras.callbacks.Callback):
    """Flips the highest bit of an exponent, once, on the last of several ranks."""

    step = 0

    def on_train_batch_end(self, batch, logs=None):
        """Spoils the weight after step 33."""
        self.step += 1
        mesh = strategy.mesh
        if self.step == 33 and 0 < mesh.rank == mesh.size - 1:
            bias = model.layers[0].bias
            bits = np.array(bias).view("int32")
            bits[0] ^= 1 << 30
            bias.assign(bits.view("float32"))


watch = tfdist.callbacks.VerifyModelSync(every_steps=5)
history = model.fit(x, y, batch_size=100, epochs=4, verbose=0, callbacks=[watch, FlipBit()])
if strategy.is_chief:
    print(f"Loss {history.history['loss'][-1]:.4f} on {strategy.mesh.size} rank(s).")
