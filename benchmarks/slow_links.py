"""Steps of a large GPT between ranks, with gradients that travel in each of several ways.

A rank of a job; `python -m tests.hosts.slow_links` runs it between two hosts on a link of a given rate:

    tfdist-run -np 2 -- python -m benchmarks.slow_links --ways=float32,bfloat16,powersgd:4

`diloco:20` sends no gradients, and synchronizes parameters every 20 steps, of which it makes as many.
The chief prints a line of JSON: for each way the seconds of each step, and what a rank sent in one.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

#: Of the GPT: the large one has 91 million parameters.
SIZES: dict[str, dict[str, Any]] = {
    "large": {"num_layers": 12, "width": 768, "num_heads": 12, "vocabulary": 8192},
    "small": {"num_layers": 4, "width": 256, "num_heads": 4, "vocabulary": 512},
}
TOKENS = 128


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ways", default="float32,bfloat16,powersgd:4")
    parser.add_argument("--size", default="large", choices=list(SIZES))
    parser.add_argument("--rows", type=int, default=2, help="The rows of each rank")
    parser.add_argument("--steps", type=int, default=4, help="The steps of each way in a round")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()

    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)

    import tfdist

    first = tfdist.strategies.auto()
    found: dict[str, dict[str, list[float]]] = {
        way: {"seconds": [], "sent": []} for way in options.ways.split(",")
    }
    for _ in range(options.rounds):
        for way, taken in found.items():
            seconds, sent = _measure(first.engine, way, options)
            taken["seconds"] += seconds
            taken["sent"] += sent
    if first.is_chief:
        print(json.dumps(found), flush=True)


def _measure(engine, way: str, options) -> tuple[list[float], list[float]]:
    """Seconds of each step, and the bytes that this rank sent in it."""
    import gc

    import keras
    import numpy as np

    from tfdist import layers, models
    from tfdist.addons import slow_links
    from tfdist.collectives.p2p import P2PEngine
    from tfdist.testing.traffic import traffic

    keras.backend.clear_session()
    gc.collect()
    sizes = dict(SIZES[options.size])
    vocabulary = sizes.pop("vocabulary")
    kind, _, every = way.partition(":")
    is_local = kind == "diloco"
    strategy = _strategy(engine, "float32" if is_local else way)
    steps = max(options.steps, int(every)) if is_local else options.steps
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = models.gpt(vocabulary, max_length=TOKENS, **sizes)
        optimizer = keras.optimizers.Adam(1e-4)
        if is_local:
            optimizer = slow_links.DiLoCo(optimizer, sync_every=int(every))
        model.compile(optimizer, layers.VocabParallelCrossEntropy(vocabulary))
    rows = options.rows * strategy.row_group.size
    text = np.random.default_rng(0).integers(0, vocabulary, (rows, TOKENS + 1)).astype("int32")
    marks: list[tuple[float, int]] = []

    class Clock(keras.callbacks.Callback):
        """Notes when each step ends, and what was sent until then."""

        def on_train_batch_end(self, batch, logs=None):
            sent = traffic().sent if isinstance(engine, P2PEngine) else 0
            marks.append((time.perf_counter(), sent))

    # The first steps are traced, travel whole, and fill the buffers.
    warm = 4
    model.fit(
        np.repeat(text[None, :, :-1], warm + steps, 0).reshape(-1, TOKENS),
        np.repeat(text[None, :, 1:], warm + steps, 0).reshape(-1, TOKENS),
        batch_size=rows,
        shuffle=False,
        verbose=0,
        callbacks=[Clock()],
    )
    times = np.diff([mark[0] for mark in marks])[warm - 1 :]
    sent = np.diff([mark[1] for mark in marks])[warm - 1 :]
    return times.tolist(), sent.tolist()


def _strategy(engine, way: str):
    """A strategy over the same ranks, whose gradients travel in that way."""
    from tfdist.launch.flags.compression import check_compression, make_compressor
    from tfdist.strategies.parallel import ParallelStrategy

    options: dict[str, Any] = {"watchdog_seconds": 0}
    if way in ("bfloat16", "float16"):
        return ParallelStrategy(engine, communication_dtype=way, **options)
    name = "none" if way == "float32" else way
    check_compression("ways", name)
    compressor = make_compressor(name, start_step=2)
    return ParallelStrategy(engine, compression=compressor, **options)


if __name__ == "__main__":
    main()
