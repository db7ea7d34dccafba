"""Watches a training: samples a second, FLOPs, and where the time of a step goes, on each rank.

    python examples/monitor.py
    tfdist-run -np 2 -- python examples/monitor.py

The figures are of all ranks together; the first few are in the logs of epochs, and so in the history. Sections
say where a step spends its time, and a rank that is slow for long is named in a warning. Needs scikit-learn,
which carries the images: pip install 'tfdist[data]'.
"""

import keras
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.strategies.auto()
keras.utils.set_random_seed(0)

digits = load_digits()
x, y = digits.images[..., None].astype("float32") / 16, digits.target

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

# `json=`, `tensorboard=` and `trace=` write files; here the reports are read from the callback itself.
monitor = tfdist.callbacks.Monitor(every=30, show=False)
history = model.fit(x, y, batch_size=60, epochs=4, verbose=0, callbacks=[monitor])

if strategy.is_chief:
    report = [each for each in monitor.reports if each.kind == "epoch"][-1]
    figures = report.logs
    print(f"{figures['samples_per_second']:,.0f} samples a second")
    print(f"{figures['model_flops_per_second'] / 1e9:.2f} GFLOP/s")
    print(f"{figures['step_seconds'] * 1e3:.1f} ms a step:")
    for section, share in sorted(report.sections.items(), key=lambda entry: -entry[1]):
        print(f"    {section:17} {share:6.1%}")
    for rank, seen in enumerate(report.ranks):
        print(f"    rank {rank} works for {seen['work'] * 1e3:.1f} ms of it")
    print(f"Loss {history.history['loss'][-1]:.4f} on {strategy.mesh.size} rank(s).")
