"""What a `Monitor` costs: steps of `fit` with one and without, in turns, on the same ranks.

    python -m tfdist.benchmarks.monitoring
    python -m tfdist.benchmarks.monitoring --only=gpt --engine=tensorflow

Each rank trains one model twice: two `fit`s in turn, of which one has the callback. The turns change
their order, so that what a machine does meanwhile meets both alike.
"""

from __future__ import annotations

import sys
import time

from tfdist.benchmarks.measuring import (
    ENVIRONMENT,
    HEADER,
    Ratio,
    parser,
    token_batches,
    write_json,
)
from tfdist.testing import RankPool

__all__ = ["main"]

#: Of the time of a step.
_MOST = 1.01
_STEPS = 48
_PARTS = ("gpt", "convnet")

#: On a rank: by part a model and its data.
_made: dict = {}


def main() -> None:
    arguments = parser(__doc__, _PARTS).parse_args()
    ratios = []
    print(HEADER)
    for part in _PARTS:
        if arguments.only in (None, part):
            with RankPool(2, arguments.engine, environment=ENVIRONMENT) as pool:
                ratio = Ratio(f"{part}, with a Monitor and without", [], [], _MOST)
                pool.run(_seconds, part, False, timeout=300)
                pool.run(_seconds, part, True, timeout=300)
                for turn in range(arguments.rounds):
                    for watched in (True, False) if turn % 2 else (False, True):
                        seconds = max(pool.run(_seconds, part, watched, timeout=300))
                        (ratio.one if watched else ratio.other).append(seconds)
                    print(f"  turn {turn}: {ratio.ratios[-1]:.4f}", file=sys.stderr, flush=True)
                ratios.append(ratio)
                print(ratio.row(), flush=True)
    write_json(arguments.json, arguments.engine, ratios)
    if any(ratio.is_over for ratio in ratios):
        sys.exit(1)


def _seconds(part: str, watched: bool) -> float:
    """The mean time of a step of `fit` on this rank; the first steps are not counted."""
    import keras

    from tfdist.monitoring import Monitor

    if part not in _made:
        _made[part] = (*_make(part), Monitor(every=20, show=False))
    model, data, monitor = _made[part]
    begins: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: begins.append(time.perf_counter())
    )
    callbacks = [clock, monitor] if watched else [clock]
    model.fit(data, steps_per_epoch=_STEPS, verbose=0, callbacks=callbacks)
    return (begins[-1] - begins[2]) / (len(begins) - 3)


def _make(part: str):
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist import models
    from tfdist.testing import strategy

    keras.utils.set_random_seed(0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy().scope():
        if part == "gpt":
            model = models.gpt(512, num_layers=4, width=256, num_heads=4, max_length=128)
        else:
            model = models.convnet((28, 28, 1), 10)
        model.compile("adam", loss)
    if part == "gpt":
        return model, token_batches(8, 128)
    images = np.random.default_rng(0).random((64, 28, 28, 1), "float32")
    labels = np.arange(64) % 10
    return model, tf.data.Dataset.from_tensors((images, labels)).repeat()


if __name__ == "__main__":
    main()
