"""Data parallelism on 2 ranks against 1 process, and collectives against their engine's own.

    python -m benchmarks.data_parallel [--engine=horovod|tensorflow] [--rounds=15]

Same model, same global batch; each rank has 1 thread, the process 2. The two worlds take turns, so that what else the machine does falls
on both; the ratio is that of each turn.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from benchmarks.measuring import (
    ENVIRONMENT,
    HEADER,
    Ratio,
    fit_step_seconds,
    in_turn,
    only,
    parser,
    write_json,
)
from tfdist.testing import RankPool

STEP_LIMIT, CALL_LIMIT = 1.05, 1.1
_STEPS = 12
#: The second normalizes over the global batch: eight more collectives, each of which a layer waits
#: for.
MODELS = ("convnet", "convnet, synchronized", "transformer")


def transformer(layers=4, width=256, heads=4, tokens=128, vocabulary=512):
    """A decoder of stock Keras layers."""
    import keras

    inputs = keras.Input((tokens,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width)(inputs)
    for _ in range(layers):
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
        x = keras.layers.Add()([x, y])
        y = keras.layers.LayerNormalization()(x)
        y = keras.layers.Dense(4 * width, activation="gelu")(y)
        x = keras.layers.Add()([x, keras.layers.Dense(width)(y)])
    outputs = keras.layers.Dense(vocabulary)(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, outputs)


def prepare(name: str, fixed_order: bool = False) -> None:
    """Builds and warms up a model on this rank; `step_seconds` then measures it."""
    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist import models
    from tfdist.testing import rank, strategy

    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    with _in_fixed_order().scope() if fixed_order else strategy().scope():
        if name == "transformer":
            model = transformer()
            x = random.integers(0, 512, (16, 128)).astype("int32")
            y = random.integers(0, 512, (16, 128)).astype("int32")
        else:
            model = models.convnet((28, 28, 1), 10)
            for layer in model.layers:
                if isinstance(layer, keras.layers.BatchNormalization):
                    layer.synchronized = name.endswith("synchronized")
            x = random.normal(size=(128, 28, 28, 1)).astype("float32")
            y = random.integers(0, 10, 128)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    rank._state[name] = (model, data)
    step_seconds(name)


def _in_fixed_order():
    """This rank's strategy whose sums are the same in each run; it starts Horovod."""
    from tfdist.strategies import HorovodStrategy
    from tfdist.testing import rank

    if "fixed order" not in rank._state:
        rank._state["fixed order"] = HorovodStrategy(deterministic=True)
    return rank._state["fixed order"]


def step_seconds(name: str) -> float:
    """The median time of a training step, on this rank."""
    from tfdist.testing import rank

    model, data = rank._state[name]
    return fit_step_seconds(model, data, _STEPS)


def call_seconds(elements: int, repeats: int, how: str) -> float:
    """The time of one all-reduce inside a function of many, on this rank.

    Args:
        elements: Of the tensor, 4 bytes each.
        repeats: All-reduces in the function, one after the other.
        how: "waited for", as `tfdist.collectives` has it, or the engine's "bare" call.
    """
    import tensorflow as tf

    from tfdist import collectives
    from tfdist.testing import engine, rank

    key = ("call", elements, how)
    if key not in rank._state:
        group = engine().group()

        # The bare operation of Horovod takes its name from the graph, where each must have its own.
        own = engine().name == "horovod"

        @tf.function
        def function(x):
            for number in range(repeats):
                if how == "bare":
                    name = f"bare{elements}.{number}" if own else f"bare{elements}"
                    x = engine().all_reduce(x, group, "mean", name)
                else:
                    x = collectives.all_reduce(x, group, "mean")
            return x

        rank._state[key] = (function, tf.ones([elements]))
    function, x = rank._state[key]
    function(x)
    begin = time.perf_counter()
    function(x)
    return (time.perf_counter() - begin) / repeats


def measure_steps(engine: str, rounds: int, models: Sequence[str] = MODELS) -> list[Ratio]:
    """2 ranks over one process."""
    found = []
    with (
        RankPool(2, engine, environment=ENVIRONMENT) as ranks,
        RankPool(1, "local", threads=2) as single,
    ):
        pools = [ranks, single]
        for name in models:
            for pool in pools:
                pool.run(prepare, name, timeout=300)
            two, one = in_turn(pools, step_seconds, rounds, name)
            found.append(Ratio(f"{name} step: 2 ranks / 1 process", two, one, STEP_LIMIT))
            print(found[-1].row(), flush=True)
    return found


def measure_calls(engine: str, rounds: int) -> list[Ratio]:
    """The all-reduce of tfdist over the engine's own."""
    found = []
    with RankPool(2, engine, environment=ENVIRONMENT) as pool:
        for elements, repeats in ((1, 40), (1 << 14, 40), (1 << 18, 20), (1 << 22, 5)):
            seconds: dict[str, list[float]] = {"waited for": [], "bare": []}
            for _ in range(rounds):
                for how, times in seconds.items():
                    times.append(max(pool.run(call_seconds, elements, repeats, how)))
            bare = seconds.pop("bare")
            for how, times in seconds.items():
                name = f"{how}: {4 * elements:,} bytes / bare call"
                found.append(Ratio(name, times, bare, CALL_LIMIT))
                print(found[-1].row(), flush=True)
    return found


def measure_fixed_order(rounds: int) -> list[Ratio]:
    """What `deterministic=True` costs: nothing is fused, and buckets have one size everywhere."""
    with (
        RankPool(3, "horovod", environment=ENVIRONMENT) as one,
        RankPool(3, "horovod", environment=ENVIRONMENT) as other,
    ):
        found = []
        for name in ("convnet", "transformer"):
            for pool in (one, other):
                with only(pool, (one, other)):
                    pool.run(prepare, name, pool is one, timeout=300)
            fixed_order, free = in_turn((one, other), step_seconds, rounds, name)
            title = f"{name}: 3 ranks, in fixed order / not"
            found.append(Ratio(title, fixed_order, free, limit=None))
            print(found[-1].row(), flush=True)
    return found


def main() -> int:
    """Prints the table; exit code 1 where a ratio is above its limit."""
    options = parser(__doc__, ["steps", "calls", "deterministic", *MODELS]).parse_args()
    print(HEADER)
    found = []
    if options.only not in ("calls", "deterministic"):
        models = (options.only,) if options.only in MODELS else MODELS
        found += measure_steps(options.engine, options.rounds, models)
    if options.only in (None, "calls"):
        found += measure_calls(options.engine, options.rounds)
    if options.only in (None, "deterministic") and options.engine == "horovod":
        found += measure_fixed_order(options.rounds)
    write_json(options.json, options.engine, found)
    return int(any(ratio.is_over for ratio in found))


if __name__ == "__main__":
    sys.exit(main())
