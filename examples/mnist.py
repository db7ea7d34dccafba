"""The field's first tutorial: a small ConvNet on MNIST, by Horovod's recipe.

    python examples/mnist.py
    tfdist-run -np 2 -- python examples/mnist.py

A batch of 32 for each rank, Adam at 0.001 times the ranks, and a warm-up of the rate. More ranks make larger
batches, so this is another training on each number of ranks, which ends at about the same accuracy. Reads
`mnist` where TensorFlow Datasets has prepared it (`tfds build mnist`), and scikit-learn's digits
elsewhere. Needs both: pip install 'tfdist[data]'.
"""

import keras

import tfdist

EPOCHS = 5


def load(name, download):
    """The images of a data set to train on and to test with, and what TFDS knows of it."""
    train, info = tfdist.addons.datasets.load(name, "train", download=download)
    test, _ = tfdist.addons.datasets.load(name, "test", download=download)
    return train, test, info


strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)
try:
    train, test, info = load("mnist", download=False)
except ValueError:  # It is not prepared here.
    train, test, info = load("digits", download=True)

replicas = strategy.num_replicas_in_sync
batch_size = 32 * replicas  # The global batch: tfdist divides it among the ranks.
samples = info.splits["train"].num_examples
rate = tfdist.learning_rate.ScaledWarmup(
    learning_rate=0.001, replicas=replicas, warmup_steps=samples // batch_size
)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input(info.features["image"].shape),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Dropout(0.25),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

train = train.cache().shuffle(samples, seed=0).batch(batch_size)
model.fit(train, epochs=EPOCHS, verbose=2)
_, accuracy = model.evaluate(test.batch(batch_size), verbose=0)
if strategy.is_chief:
    print(f"Accuracy {accuracy:.3f} with {info.name} on {strategy.mesh.size} rank(s).")
