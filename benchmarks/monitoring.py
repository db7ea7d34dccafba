"""What a `Monitor` costs: steps of `fit` with one and without, in turns, on the same ranks.

    python -m benchmarks.monitoring
    python -m benchmarks.monitoring --only=gpt --engine=tensorflow

Each rank runs two `fit`s of one model in two threads, of which one has the callback. Only one thread
runs at a time: they take turns of a second or two, shorter than most of what else a machine does.
"""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import keras

from benchmarks.measuring import ENVIRONMENT, HEADER, Ratio, parser, token_batches, write_json
from tfdist.testing import RankPool

#: Of the time of a step.
_MOST = 1.01
#: Of a turn: at least one block of steps of which ranks tell each other.
_STEPS = 24
#: That a turn may take; the first makes graphs.
_SECONDS = 300
_PARTS = ("gpt", "convnet")


def main() -> None:
    flags = parser(__doc__, _PARTS)
    flags.set_defaults(rounds=40)
    arguments = flags.parse_args()
    ratios = []
    print(HEADER)
    for part in _PARTS:
        if arguments.only in (None, part):
            with RankPool(2, arguments.engine, environment=ENVIRONMENT) as pool:
                ranks = pool.run(_seconds, part, arguments.rounds, timeout=3600)
            # Of each turn the slower rank.
            watched, alone = (
                [max(turn) for turn in zip(*(rank[side] for rank in ranks), strict=True)]
                for side in (0, 1)
            )
            ratios.append(Ratio(f"{part}, with a Monitor and without", watched, alone, _MOST))
            print(ratios[-1].row(), flush=True)
    write_json(arguments.json, arguments.engine, ratios)
    if any(ratio.is_over for ratio in ratios):
        sys.exit(1)


class _Turns(keras.callbacks.Callback):
    """Lets a `fit` run while it has its turn, and measures the turns; the first is not counted.

    Attributes:
        seconds: The mean time of a step, by turn.
    """

    def __init__(self, own: threading.Semaphore, other: threading.Semaphore):
        super().__init__()
        self.seconds: list[float] = []
        self._own, self._other, self._begin = own, other, 0.0

    def on_train_batch_begin(self, batch, logs=None):
        if batch % _STEPS:
            return
        if batch > _STEPS:
            self.seconds.append((time.perf_counter() - self._begin) / _STEPS)
        if batch:
            self._other.release()
            if not self._own.acquire(timeout=_SECONDS):
                raise TimeoutError(f"The other `fit` did not end its turn within {_SECONDS} s.")
        self._begin = time.perf_counter()


def _seconds(part: str, turns: int) -> tuple[list[float], list[float]]:
    """The time of a step of `fit` on this rank, with a `Monitor` and without, by turn."""
    from tfdist.callbacks import Monitor

    tokens = threading.Semaphore(1), threading.Semaphore(0)
    clocks = _Turns(*tokens), _Turns(*reversed(tokens))
    callbacks = [clocks[0], Monitor(every=20, show=False)], [clocks[1]]
    trainings = [_make(part) for _ in clocks]

    def train(side: int) -> None:
        model, data = trainings[side]
        tokens[side].acquire()
        try:
            # A step more, at whose beginning the last turn ends.
            steps = (turns + 1) * _STEPS + 1
            model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=callbacks[side])
        finally:
            tokens[1 - side].release()

    with ThreadPoolExecutor(len(clocks)) as threads:
        list(threads.map(train, range(len(clocks))))
    return clocks[0].seconds, clocks[1].seconds


def _make(part: str):
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
