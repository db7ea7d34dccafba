"""The keras.io guide on distributed training with TensorFlow, as a script for tfdist.

    python examples/keras_io_guide.py
    tfdist-run -np 2 -- python examples/keras_io_guide.py

The guide (https://keras.io/guides/distributed_training_with_tensorflow) trains a classifier of digits under
`tf.distribute.MirroredStrategy`, which Keras 3 supports in part. What changes here is the line of the
strategy: one process for each device, the same on one machine and on many. Model, compile, fit, evaluate,
and the checkpoints that make it fault-tolerant, are those of plain Keras. The batch size is global, as in the
guide. Needs scikit-learn, which carries the digits: pip install 'tfdist[data]'.
"""

import tempfile
from pathlib import Path

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

BATCH = 32  # Of all ranks together.

# In the guide: strategy = tf.distribute.MirroredStrategy()
strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)


def compiled_model():
    """A perceptron of two hidden layers."""
    inputs = keras.Input(shape=(64,))
    hidden = keras.layers.Dense(256, activation="relu")(inputs)
    hidden = keras.layers.Dense(256, activation="relu")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(10)(hidden))
    model.compile(
        optimizer=keras.optimizers.SGD(0.02, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return model


def datasets():
    """Training, validation and test: the whole of each on all ranks, which take their rows of a batch."""
    digits = load_digits()
    x, y = digits.data.astype("float32") / 16, digits.target
    parts = slice(0, 1200), slice(1200, 1500), slice(1500, None)
    train, *others = [tf.data.Dataset.from_tensor_slices((x[part], y[part])) for part in parts]
    return [data.batch(BATCH) for data in (train.shuffle(1200, seed=0), *others)]


train, validation, test = datasets()

with tempfile.TemporaryDirectory() as own:
    # Fault tolerance: the chief writes, and all ranks read, so the folder is one that all of them see.
    folder = Path(tfdist.collectives.broadcast_object(own, strategy.group()))
    checkpoint = keras.callbacks.ModelCheckpoint(folder / "epoch-{epoch}.keras")
    for epochs in (2, 4):  # The second time as after a restart: from the newest file.
        # What the chief sees counts, so that all ranks begin alike.
        files = tfdist.collectives.broadcast_object(
            sorted(folder.glob("*.keras")), strategy.group()
        )
        with strategy.scope():
            model = keras.models.load_model(files[-1]) if files else compiled_model()
        model.fit(
            train,
            initial_epoch=len(files),
            epochs=epochs,
            validation_data=validation,
            callbacks=[checkpoint],
            verbose=2,
            shuffle=False,  # The data set shuffles.
        )
    loss, accuracy = model.evaluate(test, verbose=0)

if strategy.is_chief:
    print(f"Accuracy {accuracy:.2%}, loss {loss:.4f}, on {strategy.mesh.size} rank(s).")
