"""ZeRO-3: the ranks share out parameters, gradients and the optimizer's state, and report the bytes.

    python examples/zero.py
    tfdist-run -np 2 -- python examples/zero.py

With N ranks each holds an N-th of the whole; layers are gathered as they are needed. The result is that
of one process up to float rounding. Needs scikit-learn, which carries the images:
pip install 'tfdist[data]'.
"""

import keras
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.strategies.auto(zero_stage=3)
keras.utils.set_random_seed(0)

digits = load_digits()
x, y = digits.data.astype("float32") / 16, digits.target
train, test = slice(0, 1400), slice(1400, None)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            *[keras.layers.Dense(256, activation="relu") for _ in range(4)],
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        # Adam divides by its epsilon where gradients vanish: a small one blows rounding up.
        keras.optimizers.AdamW(1e-3, epsilon=1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(x[train], y[train], batch_size=100, epochs=4, verbose=2)
loss, accuracy = model.evaluate(x[test], y[test], verbose=0)
report = tfdist.addons.monitoring.memory_report(model)
if strategy.is_chief:
    print(report.table())
    print(f"Accuracy {accuracy:.2%}, loss {loss:.4f}, on {strategy.mesh.size} rank(s).")
