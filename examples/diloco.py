"""DiLoCo, for slow links: ranks train apart, and meet every 20 steps.

    python examples/diloco.py
    tfdist-run -np 2 -- python examples/diloco.py

Between two meetings nothing travels. Then the mean of what the ranks have learned is a gradient for an outer
optimizer (Douillard et al. 2023). That is another algorithm than synchronous training, and no two numbers of
ranks give the same weights; here they end at about the same accuracy. Needs scikit-learn:
pip install 'tfdist[data]'.
"""

import keras
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)

digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target
train, test = slice(0, 1400), slice(1400, None)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    inner = keras.optimizers.AdamW(3e-3)
    model.compile(
        tfdist.addons.slow_links.DiLoCo(inner, sync_every=20, outer_momentum=0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

# A batch of 70 has 20 steps an epoch, so there is a meeting at the end of each.
model.fit(x[train], y[train], batch_size=70, epochs=15, verbose=2)
_, accuracy = model.evaluate(x[test], y[test], verbose=0)
if strategy.is_chief:
    print(f"300 steps; the ranks met 15 times, over {model.count_params() * 4:,} bytes of weights.")
    print(f"Accuracy {accuracy:.3f} on {strategy.mesh.size} rank(s).")
