"""How benchmarks measure on noisy machines: two worlds in turn, and the ratio of each turn."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import psutil

from tfdist.launch.plan.trials import fit_begins, forget_peak, median_interval
from tfdist.testing import RankPool

#: What ends the place in a document that is renewed.
_END = "<!-- end -->"


@dataclasses.dataclass
class Ratio:
    """Paired measurements of two things, in seconds."""

    name: str
    one: list[float]
    other: list[float]
    limit: float | None

    @property
    def ratios(self) -> list[float]:
        """One over the other, by turn."""
        return [a / b for a, b in zip(self.one, self.other, strict=True)]

    @property
    def median(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def is_over(self) -> bool:
        """Whether the ratio is above its limit."""
        return self.limit is not None and self.median > self.limit

    def row(self) -> str:
        """A line of the report."""
        low, _, high = statistics.quantiles(self.ratios, n=4)
        limit = "" if self.limit is None else f"  at most {self.limit:g}"
        return (
            f"{self.name:<44} {1e3 * statistics.median(self.one):9.3f} ms "
            f"{1e3 * statistics.median(self.other):9.3f} ms   {self.median:5.3f}  "
            f"[{low:5.3f}, {high:5.3f}]{limit}"
        )


#: Gloo counts the time for which `only` holds a rank still, and gives up after 30 s of its own.
ENVIRONMENT = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}

HEADER = f"{'':<44} {'this':>12} {'other':>12}   ratio  [quartiles]"


@contextlib.contextmanager
def only(pool: RankPool, pools: Sequence[RankPool]) -> Iterator[None]:
    """Holds all other pools still: idle ranks of Horovod look for work a thousand times a second."""
    others = [pid for other in pools if other is not pool for pid in other.pids]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


def in_turn(
    pools: Sequence[RankPool], function: Callable, rounds: int, *args, timeout: float = 300.0
) -> list[list[float]]:
    """Runs `function(*args)` on each pool in turn; returns each pool's slowest rank, by round."""
    seconds: list[list[float]] = [[] for _ in pools]
    for _ in range(rounds):
        for index, pool in enumerate(pools):
            with only(pool, pools):
                seconds[index].append(max(pool.run(function, *args, timeout=timeout)))
    return seconds


def variants_in_turn(
    pool: RankPool, variants: Sequence, prepare: Callable, seconds: Callable, rounds: int
) -> dict:
    """Prepares variants on the ranks of one pool, and measures them in turn.

    Args:
        pool: The ranks.
        variants: What `prepare` and `seconds` are called with.
        prepare: Called once for each variant.
        seconds: What is measured.
        rounds: How often.

    Returns:
        By variant, the seconds of the slowest rank in each round.
    """
    found: dict = {variant: [] for variant in variants}
    for variant in variants:
        pool.run(prepare, variant, timeout=300)
    for _ in range(rounds):
        for variant in variants:
            found[variant].append(max(pool.run(seconds, variant, timeout=300)))
    return found


def token_batches(rows: int, length: int, vocabulary: int = 512):
    """A data set of one batch of random tokens and labels, again and again."""
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(0)
    tokens, labels = (random.integers(0, vocabulary, (rows, length), "int32") for _ in range(2))
    return tf.data.Dataset.from_tensors((tokens, labels)).repeat()


def wide_gpt(**options):
    """A GPT with wide layers on this rank's mesh, compiled, and data for it.

    Args:
        options: For the strategy, as `zero_stage`.
    """
    import keras

    from tfdist import layers, models
    from tfdist.testing import strategy

    keras.utils.set_random_seed(0)
    with strategy(**options).scope():
        model = models.gpt(512, num_layers=2, width=1024, num_heads=16, max_length=128)
        model.compile("adam", layers.VocabParallelCrossEntropy(512))
    return model, token_batches(16, 128)


def peak_above(function: Callable[[], Any]) -> tuple[int, Any]:
    """By how many bytes a function raises this process's resident memory at the highest, and its result."""
    # Tests of the core import this module where there are no add-ons.
    from tfdist.addons.monitoring.process_memory import peak_bytes

    before = psutil.Process().memory_info().rss
    forget_peak()
    result = function()
    return peak_bytes() - before, result


def fit_step_seconds(model, data, steps: int) -> float:
    """The median time of a step of `fit` on this rank; the first is not counted."""
    return median_interval(fit_begins(model, data, steps))


def parser(description: str | None, only: Iterable[str]) -> argparse.ArgumentParser:
    """The flags that all benchmarks have.

    Args:
        description: The benchmark's docstring.
        only: Its parts, of which one may be asked for.
    """
    found = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    found.add_argument("--engine", choices=["horovod", "tensorflow"], default="horovod")
    found.add_argument("--rounds", type=int, default=15)
    found.add_argument("--only", choices=list(only))
    found.add_argument("--json", help="A file for the measurements.")
    return found


def write_json(path: str | None, engine: str, ratios: Sequence[Ratio], **more) -> None:
    """Writes the measurements behind some ratios, where a path is given."""
    if not path:
        return
    rows = [{"name": r.name, "this": r.one, "other": r.other, "limit": r.limit} for r in ratios]
    with open(path, "w") as file:
        json.dump({"engine": engine, "seconds": rows, **more}, file, indent=1)


def has_between(path: str | os.PathLike[str], mark: str) -> bool:
    """Whether a document has the place that `write_between` writes to.

    Raises:
        OSError: It cannot be read.
    """
    _, begin, _, end, _ = _cut(path, mark)
    return bool(begin and end)


def _cut(path: str | os.PathLike[str], mark: str) -> tuple[str, str, str, str, str]:
    with open(path, encoding="utf-8") as file:
        before, begin, rest = file.read().partition(f"<!-- {mark} -->")
    inside, end, after = rest.partition(_END)
    return before, begin, inside, end, after


def write_between(path: str | os.PathLike[str], mark: str, text: str) -> None:
    """Puts text into a document, between `<!-- mark -->` and the `<!-- end -->` after it.

    Raises:
        OSError: The document cannot be read or written.
        ValueError: It has no such place.
    """
    before, begin, _, end, after = _cut(path, mark)
    if not begin or not end:
        raise ValueError(f"A place is missing in {path}: <!-- {mark} --> ... {_END}.")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{before}{begin}\n{text}\n{end}{after}")
