"""What compression of gradients costs in quality, at equal steps.

    python -m benchmarks.convergence [--only=digits|text] [--seeds=3]

Two ranks with 1 thread each train a ConvNet on the digits (its limit: points of test accuracy below that
of float32 gradients) and a GPT on the bytes of the Python reference (percent of validation perplexity
above). Each way and each seed begins from the same weights, and sees the same batches.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from typing import Any

from tabulate import tabulate

from tfdist.testing import RankPool

#: By way, the points of accuracy and the percent of perplexity that it may cost; None where no limit is
#: set.
LIMITS: dict[str, tuple[float, float] | None] = {
    "powersgd:4": (0.5, 2.0),
    "int8": (0.5, 2.0),
    "int4": None,
    "topk:0.01": (1.0, 4.0),
    "onebit": (1.0, 4.0),
}
#: Those whose GPT learns by 1-bit Adam: its momentum travels, and nothing is clipped.
_MOMENTUM = frozenset({"topk:0.01", "onebit"})
_EPOCHS, _ROWS = 20, 64
_LENGTH, _BATCH, _STEPS, _WARMUP = 64, 16, 4800, 100


def _strategy(way: str, start_step: int):
    """A strategy over the ranks of the pool; in the first steps more is sent."""
    from tfdist.launch.flags.compression import make_compressor
    from tfdist.testing import strategy

    options: dict[str, Any] = {"start_step": start_step}
    if way.startswith("topk"):
        # From a quarter of all entries down to the share: Lin et al. 2018, arXiv:1712.01887.
        options["warmup_steps"] = start_step
    compressor = make_compressor(way, **({} if way == "none" else options))
    return strategy(compression=compressor)


def digits(way: str, seed: int) -> float:
    """The test accuracy in points."""
    import keras

    from tfdist import models
    from tfdist.addons import datasets

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    train, info = datasets.load("digits", "train")
    test, _ = datasets.load("digits", "test")
    size = info.splits["train"].num_examples
    steps = _EPOCHS * -(-size // _ROWS)
    with _strategy(way, steps // 10).scope():
        model = models.convnet(info.features["image"].shape, info.features["label"].num_classes)
        model.compile(
            keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(2e-3, steps)),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    train = train.cache().shuffle(size, seed=seed).batch(_ROWS)
    model.fit(train, epochs=_EPOCHS, verbose=0)
    return 100 * model.evaluate(test.batch(_ROWS), verbose=0, return_dict=True)["accuracy"]


def text(way: str, seed: int) -> float:
    """The validation perplexity."""
    import keras

    from tfdist import layers, models
    from tfdist.addons import datasets, slow_links

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    found = datasets.load_text("pydoc")
    train = datasets.language_model_windows(found.train, _LENGTH, shuffle_seed=seed)
    test = datasets.language_model_windows(found.validation, _LENGTH).batch(64)
    # 1-bit Adam wants its second moments first.
    start = _STEPS // 5 if way in _MOMENTUM else _STEPS // 10
    with _strategy(way, start).scope():
        model = models.gpt(256, num_layers=2, width=96, num_heads=4, max_length=_LENGTH)
        schedule = keras.optimizers.schedules.CosineDecay(
            0.0, _STEPS - _WARMUP, alpha=0.1, warmup_target=3e-3, warmup_steps=_WARMUP
        )
        if way in _MOMENTUM:
            optimizer = slow_links.OneBitAdam(schedule, freeze_step=start)
        else:
            optimizer = keras.optimizers.AdamW(schedule, global_clipnorm=1.0)
        model.compile(optimizer, layers.VocabParallelCrossEntropy(256))
    data = train.batch(_BATCH, drop_remainder=True).repeat()
    model.fit(data, steps_per_epoch=_STEPS, verbose=0)
    return math.exp(model.evaluate(test, verbose=0))


#: By task: what measures it, how much worse a value is than that of float32, and which limit counts.
TASKS = {
    "digits": (digits, lambda value, base: base - value, 0),
    "text": (text, lambda value, base: 100 * (value / base - 1), 1),
}


def main() -> int:
    """Prints a table for each task; exit code 1 where a way costs more than its limit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", help="Ways in addition to float32, with commas [all].")
    parser.add_argument("--engine", default="horovod", choices=["horovod", "tensorflow"])
    options = parser.parse_args()
    ways = options.ways.split(",") if options.ways else list(LIMITS)
    is_over = False
    with RankPool(2, options.engine, threads=1) as pool:
        for name in [options.only] if options.only else TASKS:
            measure, worse, place = TASKS[name]
            rows: list[tuple] = []
            found: dict[str, list[float]] = {}
            for way in ("none", *ways):
                found[way] = [
                    pool.run(measure, way, seed, timeout=900)[0] for seed in range(options.seeds)
                ]
                costs = [worse(a, b) for a, b in zip(found[way], found["none"], strict=True)]
                given = LIMITS.get(way)
                limit = given[place] if given else None
                cost = statistics.mean(costs)
                is_over |= limit is not None and cost > limit
                rows.append((way, statistics.mean(found[way]), cost, min(costs), max(costs), limit))
                print(f"{name} {way}: {found[way]}", file=sys.stderr, flush=True)
            heads = ("way", name, "cost", "least", "most", "at most")
            print(tabulate(rows, heads, floatfmt=".2f", missingval=""), flush=True)
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
