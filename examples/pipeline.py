"""A perceptron cut into stages: with two ranks, two stages, and eight micro-batches that follow each other.

    python examples/pipeline.py
    tfdist-run -np 2 -- python examples/pipeline.py

Each rank holds the layers of its own stage. One rank holds all of them, and the update is the same up to
float rounding. Needs scikit-learn, which carries the images: pip install 'tfdist[data]'.
"""

import keras
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.strategies.auto(tfdist.Mesh(data=1, pipeline=-1))
keras.utils.set_random_seed(0)

digits = load_digits()
# Rows of a batch divide by the number of micro-batches.
x, y = digits.data[:1760].astype("float32") / 16, digits.target[:1760]
train, test = slice(0, 1440), slice(1440, None)

with strategy.scope():
    # Has shapes and no values: each rank draws the weights of its own stage alone.
    with tfdist.pipeline.deferred_weights():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                *[keras.layers.Dense(96, activation="relu") for _ in range(5)],
                keras.layers.Dense(10),
            ]
        )
    model = tfdist.pipeline.PipelineModel(model, num_microbatches=8, schedule="1f1b")
    model.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

if strategy.is_chief:
    print(model.partition.table())

model.fit(x[train], y[train], batch_size=96, epochs=6, verbose=2)
loss, accuracy = model.evaluate(x[test], y[test], verbose=0)
if strategy.is_chief:
    print(f"Accuracy {accuracy:.2%}, loss {loss:.4f}, on {strategy.mesh.size} rank(s).")
