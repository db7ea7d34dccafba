"""Trainings with compressed gradients."""

from __future__ import annotations

import keras
import numpy as np


def train(
    kind: str | None,
    arguments: dict | None = None,
    *,
    zero_stage: int = 0,
    rows: int = 50,
    epochs: int = 4,
    **compile_options,
):
    """Weights after some epochs of 5 batches, the last of 2 rows; and what compression has measured."""
    from tfdist.addons import slow_links
    from tfdist.testing import strategy

    options = {"zero_stage": zero_stage}
    if kind is not None:
        options["compression"] = getattr(slow_links, kind)(**(arguments or {}))
    return fitted(strategy(**options), rows, epochs, **compile_options)


def fitted(
    on,
    rows: int,
    epochs: int,
    *,
    accumulate: int | None = None,
    scaled: bool = False,
    freeze: int | None = None,
):
    keras.utils.set_random_seed(0)
    with on.scope():
        model = keras.Sequential(
            [
                keras.Input((24,)),
                keras.layers.Dense(48, activation="tanh"),
                keras.layers.Dense(40, activation="tanh"),
                keras.layers.Dense(3),
            ]
        )
        optimizer = keras.optimizers.SGD(
            0.05, momentum=0.9, global_clipnorm=1.0, gradient_accumulation_steps=accumulate
        )
        if freeze is not None:
            from tfdist.addons.slow_links import OneBitAdam

            optimizer = OneBitAdam(
                0.01, freeze, gradient_accumulation_steps=accumulate, weight_decay=0.1
            )
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=3)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    random = np.random.default_rng(3)
    labels = random.integers(0, 3, rows)
    x = (random.normal(size=(rows, 24)) + labels[:, None] / 3).astype("float32")
    history = model.fit(x, labels, batch_size=12, epochs=epochs, shuffle=False, verbose=0)
    return [variable.numpy() for variable in model.variables], history.history["loss"]
