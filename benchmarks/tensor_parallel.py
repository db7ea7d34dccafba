"""GPT on 2 tensor ranks, on one process, and written by hand in TensorFlow.

    python -m benchmarks.tensor_parallel [--engine=horovod|tensorflow] [--rounds=15]

Same sizes, same batch, same optimizer; each rank has 1 thread, a process 2. The worlds take
turns, so that what else the machine does falls on all; a ratio is that of one turn.
"""

from __future__ import annotations

import sys
import time

from benchmarks.measuring import (
    ENVIRONMENT,
    HEADER,
    Ratio,
    fit_step_seconds,
    in_turn,
    parser,
    write_json,
)
from tfdist.launch.plan.trials import median_interval
from tfdist.testing import RankPool

#: Layers, width, heads, tokens, vocabulary, batch.
SIZES = {
    "4 layers, width 256": (4, 256, 4, 128, 512, 16),
    "2 layers, width 1024": (2, 1024, 16, 128, 512, 8),
}
DEVICE_LIMIT, RANKS_LIMIT = 1.05, 1.15
_STEPS = 8


def prepare(name: str, kind: str) -> None:
    """Builds and warms up a model on this rank; `step_seconds` then measures it."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist import Mesh, layers, models
    from tfdist.testing import rank, strategy

    keras.utils.set_random_seed(0)
    num_layers, width, heads, length, vocabulary, batch = SIZES[name]
    random = np.random.default_rng(0)
    tokens, labels = (random.integers(0, vocabulary, (batch, length), "int32") for _ in range(2))
    if kind == "raw":
        from benchmarks.raw_gpt import RawGPT

        raw = RawGPT(vocabulary, num_layers, width, heads, length, keras.optimizers.Adam())
        x, y = tf.constant(tokens), tf.constant(labels)
        rank._state[name] = lambda: raw.step(x, y).numpy()
    else:
        with strategy(Mesh(data=1, tensor=-1)).scope():
            model = models.gpt(
                vocabulary, num_layers=num_layers, width=width, num_heads=heads, max_length=length
            )
            model.compile("adam", layers.VocabParallelCrossEntropy(vocabulary))
        data = tf.data.Dataset.from_tensors((tokens, labels)).repeat()
        rank._state[name] = (model, data)
    step_seconds(name)


def step_seconds(name: str) -> float:
    """The median time of a training step, on this rank."""
    from tfdist.testing import rank

    prepared = rank._state[name]
    if not callable(prepared):
        model, data = prepared
        return fit_step_seconds(model, data, _STEPS)
    begins: list[float] = []
    for _ in range(_STEPS):
        begins.append(time.perf_counter())
        prepared()
    return median_interval(begins)


def measure(engine: str, rounds: int, names) -> list[Ratio]:
    """Three worlds in turn."""
    found = []
    with (
        RankPool(2, engine, environment=ENVIRONMENT) as ranks,
        RankPool(1, "local", threads=2) as one,
        RankPool(1, "local", threads=2) as raw,
    ):
        for name in names:
            for pool, kind in ((ranks, "tfdist"), (one, "tfdist"), (raw, "raw")):
                pool.run(prepare, name, kind, timeout=300)
            two, single, by_hand = in_turn([ranks, one, raw], step_seconds, rounds, name)
            # At the smaller width the products are too small for a bound on two ranks.
            limit = RANKS_LIMIT if "1024" in name else None
            for row in (
                Ratio(f"{name}: one process / by hand", single, by_hand, DEVICE_LIMIT),
                Ratio(f"{name}: 2 ranks / one process", two, single, limit),
                Ratio(f"{name}: 2 ranks / by hand", two, by_hand, None),
            ):
                found.append(row)
                print(row.row(), flush=True)
    return found


def main() -> int:
    """Prints the table; exit code 1 where a ratio is above its limit."""
    options = parser(__doc__, SIZES).parse_args()
    print(HEADER)
    found = measure(options.engine, options.rounds, [options.only] if options.only else SIZES)
    write_json(options.json, options.engine, found)
    return int(any(ratio.is_over for ratio in found))


if __name__ == "__main__":
    sys.exit(main())
