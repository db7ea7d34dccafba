"""A training that is cut off in the middle of an epoch, and goes on there.

    python examples/checkpoint.py
    tfdist-run -np 2 -- python examples/checkpoint.py

The first `fit` saves every 5 steps and is cut off in step 22, the 8th of its second epoch. The second
begins with a new model, finds the save of step 20, and trains the 22 steps that are left. Its loss is that of
a third, which was never cut off. Needs scikit-learn: pip install 'tfdist[data]'.
"""

import tempfile

import keras
from sklearn.datasets import load_digits

import tfdist

strategy = tfdist.strategies.auto()
digits = load_digits()
x, y = digits.data[:1400].astype("float32") / 16, digits.target[:1400]


class CutOff(keras.callbacks.Callback):
    """Raises in a step, as a power cut would end it, but on all ranks."""

    def __init__(self, after_steps):
        super().__init__()
        self.left = after_steps

    def on_train_batch_end(self, batch, logs=None):
        """Counts the steps."""
        self.left -= 1
        if not self.left:
            raise InterruptedError(f"Cut off after step {batch + 1} of this epoch.")


def train(*callbacks):
    """The loss of the last of three epochs with 14 steps each, and how many steps were trained here."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss)
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    history = model.fit(x, y, batch_size=100, epochs=3, verbose=0, callbacks=[count, *callbacks])
    return history.history["loss"][-1], len(steps)


# All ranks save into one folder.
folder = tempfile.mkdtemp() if strategy.is_chief else None
folder = tfdist.collectives.broadcast_object(folder, strategy.group())
try:
    # Waits for each save. One that goes on beside training may be lost where it is cut off.
    saver = tfdist.callbacks.Checkpointer(folder, every_steps=5, asynchronous=False)
    train(saver, CutOff(after_steps=22))
except InterruptedError as error:
    cut_off = str(error)
resumed, steps = train(tfdist.callbacks.Checkpointer(folder, every_steps=5))
whole, _ = train()
if strategy.is_chief:
    print(f"{cut_off} Resumed, and trained {steps} of 42 steps.")
    print(f"Loss {resumed:.4f} (never cut off: {whole:.4f}) on {strategy.mesh.size} rank(s).")
