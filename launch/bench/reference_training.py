"""The script of `tfdist-bench scaling --model=`: train a reference model on random data.

`tfdist-run -np 2 -- python reference_training.py gpt 16`, with the model and the rows of an update.
"""

from __future__ import annotations

import sys

import keras
import numpy as np

import tfdist

_SEED = 0
_VOCABULARY, _TOKENS = 512, 128
_IMAGE, _CLASSES = (28, 28, 1), 10


def main(name: str, rows: int) -> None:
    """Train a model until the process is stopped."""
    random = np.random.default_rng(_SEED)
    strategy = tfdist.strategies.auto()
    keras.utils.set_random_seed(_SEED)
    with strategy.scope():
        if name == "gpt":
            model = tfdist.models.gpt(
                _VOCABULARY, num_layers=4, width=256, num_heads=4, max_length=_TOKENS
            )
            loss = tfdist.layers.VocabParallelCrossEntropy(_VOCABULARY)
        else:
            model = tfdist.models.convnet(_IMAGE, _CLASSES)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    if name == "gpt":
        x, y = (random.integers(0, _VOCABULARY, (8 * rows, _TOKENS), "int32") for _ in range(2))
    else:
        x = random.normal(size=(8 * rows, *_IMAGE)).astype("float32")
        y = random.integers(0, _CLASSES, 8 * rows)
    model.fit(x, y, batch_size=rows, epochs=1_000_000, verbose=0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
