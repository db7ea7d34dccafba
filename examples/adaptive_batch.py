"""Measures the noise of gradients, and lets the batch grow with it.

    python examples/adaptive_batch.py
    tfdist-run -np 2 -- python examples/adaptive_batch.py

While the noise scale is above twice the batch, a larger one takes fewer updates to the same loss (McCandlish et al.
2018). `GradientNoise` alone measures it and changes nothing. The noise is told from the parts of a batch, of which two
ranks have twice as many, so the batch may grow at another step. Needs scikit-learn: pip install 'tfdist[data]'.
"""

import keras
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)

digits = load_digits()
x, y = digits.data[:1600].astype("float32") / 16, digits.target[:1600]

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        # An update takes 8 batches at most: 2 at first, and more as the noise says.
        keras.optimizers.SGD(0.05, gradient_accumulation_steps=8),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

adaptive = tfdist.addons.unequal_ranks.AdaptiveBatch(start=2, every=20)
history = model.fit(x, y, batch_size=32, epochs=10, verbose=0, callbacks=[adaptive])
if strategy.is_chief:
    logs = history.history
    for epoch in (0, 4, 9):
        print(
            f"epoch {epoch + 1:2}: noise scale {logs['noise_scale'][epoch]:6.0f} samples, "
            f"{logs['batch_rows'][epoch]:.0f} of them to an update"
        )
    print(f"Loss {logs['loss'][-1]:.4f} on {strategy.mesh.size} rank(s).")
