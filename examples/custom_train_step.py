"""Trains a model with a `train_step` of its own: an autoencoder of handwritten digits.

    python examples/custom_train_step.py
    tfdist-run -np 2 -- python examples/custom_train_step.py

The step is written for one process. On many ranks it gets this rank's rows of the batch; the
gradients are averaged over all samples inside `optimizer.apply`, and what the step returns is
averaged likewise. Needs scikit-learn: pip install 'tfdist[data]'.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist


class Autoencoder(keras.Model):
    """Squeezes 64 pixels through a few numbers and back."""

    def __init__(self, width: int):
        super().__init__()
        layers = keras.layers
        self.encoder = keras.Sequential(
            [layers.Dense(48, activation="relu"), layers.Dense(width)], name="encoder"
        )
        self.decoder = keras.Sequential(
            [layers.Dense(48, activation="relu"), layers.Dense(64, activation="sigmoid")],
            name="decoder",
        )
        self.error = keras.metrics.Mean(name="error")

    def call(self, images):
        """The images as the few numbers tell them."""
        return self.decoder(self.encoder(images))

    def train_step(self, data):
        """One update."""
        images, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            error = self._error_of(images)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(error, variables), variables)
        self.error.update_state(error)
        return {"error": self.error.result()}

    def test_step(self, data):
        """The error alone."""
        images, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.error.update_state(self._error_of(images))
        return {"error": self.error.result()}

    @property
    def metrics(self):
        """What Keras resets at the start of an epoch."""
        return [self.error]

    def _error_of(self, images):
        return keras.ops.mean(keras.ops.square(self(images) - images))


strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)

images = load_digits().data.astype("float32") / 16
train, test = images[:1400], images[1400:]

with strategy.scope():
    model = Autoencoder(width=8)
    model.compile(keras.optimizers.Adam(3e-3))

model.fit(train, batch_size=100, epochs=8, verbose=2)
error = model.evaluate(test, batch_size=100, verbose=0, return_dict=True)["error"]
if strategy.is_chief:
    print(f"Mean squared error {error:.4f} on {strategy.mesh.size} rank(s).")
