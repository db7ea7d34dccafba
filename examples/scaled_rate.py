"""Horovod's recipe: a batch of 16 for each rank, the learning rate times the ranks, and a warm-up.

    python examples/scaled_rate.py
    tfdist-run -np 2 -- python examples/scaled_rate.py

More ranks make larger batches, so this is another training on each number of ranks: N times fewer steps,
N times as large (Goyal et al. 2017). Where the rule holds, it ends at about the same accuracy. The other
examples keep the global batch instead. Needs scikit-learn: pip install 'tfdist[data]'.
"""

import keras
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)

digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target
train, test = slice(0, 1400), slice(1400, None)

replicas = strategy.num_replicas_in_sync
batch_size = 16 * replicas  # The global batch: tfdist divides it among the ranks.
rate = tfdist.learning_rate.ScaledWarmup(
    learning_rate=0.02, replicas=replicas, warmup_steps=5 * 1400 // batch_size
)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(rate, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(x[train], y[train], batch_size=batch_size, epochs=12, verbose=2)
_, accuracy = model.evaluate(x[test], y[test], verbose=0)
if strategy.is_chief:
    steps = int(model.optimizer.iterations)
    print(
        f"{steps} steps with {batch_size} rows each, the last at a rate of {float(rate(steps)):.2f}."
    )
    print(f"Accuracy {accuracy:.3f} on {strategy.mesh.size} rank(s).")
