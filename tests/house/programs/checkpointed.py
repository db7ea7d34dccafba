"""A training that wrote the folder in `golden/checkpoint.zip` at commit e9f7190, and goes on from it.

tfdist-run -np 2 --engine=tensorflow -- python checkpointed.py FOLDER
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np

import tfdist
from tfdist.callbacks import Checkpointer


def train(strategy, folder, epochs):
    """The losses of all epochs, and the number of the first one that was trained now."""
    chance = np.random.default_rng(7)
    x, y = chance.normal(size=(24, 5)).astype("float32"), chance.integers(0, 3, 24)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(8, activation="tanh", name="hidden"),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dense(3, name="last"),
            ]
        )
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    saving = Checkpointer(folder, every_steps=4, batch_size=8)
    begun = []
    counting = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: begun.append(epoch))
    history = model.fit(
        x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=[saving, counting]
    )
    return history.history["loss"], begun[0]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    strategy = tfdist.strategies.auto(zero_stage=2)
    train(strategy, str(folder / "checkpoint"), 4)
    going_on, _ = train(strategy, str(folder / "going_on"), 9)
    if strategy.is_chief:
        (folder / "losses.json").write_text(json.dumps(going_on))
