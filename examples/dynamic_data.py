"""Parts of the data go to whichever rank is free, so that no rank waits for one with more to read.

    python examples/dynamic_data.py
    tfdist-run -np 2 -- python examples/dynamic_data.py

In each epoch every row goes to one rank. Which one depends on who asks first, so two runs differ as two orders of
the data do. Needs scikit-learn, which carries the images: pip install 'tfdist[data]'.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)

digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target
train, test = slice(0, 1400), slice(1400, None)
images, labels = tf.constant(x[train]), tf.constant(y[train])
# What is handed out: ranges of 70 rows here, else files, whose names `read` would get.
shards = tfdist.addons.unequal_ranks.DynamicSharding(
    len(images), strategy, chunk=70, shuffle_seed=1
)


def read(rows):
    """The rows of a range."""
    return tf.data.Dataset.from_tensor_slices(
        (images[rows[0] : rows[1]], labels[rows[0] : rows[1]])
    )


def own(context):
    """The batches of this rank."""
    return shards.dataset().flat_map(read).batch(70 // strategy.mesh.size)


with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(shards.distribute(own), epochs=12, verbose=2)
_, accuracy = model.evaluate(x[test], y[test], verbose=0)
if strategy.is_chief:
    print(f"Accuracy {accuracy:.3f} on {strategy.mesh.size} rank(s).")
