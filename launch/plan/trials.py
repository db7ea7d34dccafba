"""Measurements of time and memory of layouts on the ranks of a pool.

The functions run on ranks, for `tfdist-plan calibrate` and the benchmark of the planner.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from tfdist.addons.planner import Layout, Transformer

#: Number of timed steps.
STEPS = 6


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of a layout on a rank.

    Attributes:
        seconds: Median seconds of an update.
        peak: Peak bytes of the process, minus `before`.
        before: Bytes of the process before the model is built.
    """

    seconds: float
    peak: int
    before: int


def model_of(sizes: Transformer, **options: Any) -> Any:
    """Build a `tfdist.models.gpt` of a transformer's sizes."""
    from tfdist import models

    return models.gpt(
        sizes.vocabulary,
        num_layers=sizes.layers,
        width=sizes.width,
        num_heads=sizes.heads,
        hidden_dim=sizes.hidden_units,
        max_length=sizes.length,
        num_experts=sizes.experts,
        top_k=sizes.top_k,
        experts={"balance_over": "sequence"} if sizes.experts else None,
        **options,
    )


def trial(sizes: Transformer, layout: Layout, global_batch: int, steps: int = STEPS) -> Measured:
    """Train some steps with a layout on all ranks of the pool.

    Args:
        sizes: The model.
        layout: The layout.
        global_batch: Samples of an update.
        steps: Number of timed steps.
    """
    from tfdist.testing import strategy

    return train(
        strategy(layout.mesh, zero_stage=layout.zero_stage), sizes, layout, global_batch, steps
    )


def alone(sizes: Transformer, rows: int, steps: int = STEPS) -> Measured:
    """Train some steps on each rank of the pool separately, at the same time."""
    from tfdist import strategies
    from tfdist.addons import planner

    return train(strategies.LocalStrategy(), sizes, planner.Layout(), rows, steps)


def train(
    strategy: Any, sizes: Transformer, layout: Layout, global_batch: int, steps: int = STEPS
) -> Measured:
    """Train some steps with a layout under a strategy with its mesh.

    Args:
        strategy: The strategy, with the layout's ZeRO stage.
        sizes: The model.
        layout: The layout.
        global_batch: Samples of an update.
        steps: Number of timed steps, which follow two others.
    """
    import contextlib

    import keras
    import numpy as np
    import tensorflow as tf

    from tfdist import layers
    from tfdist.addons.monitoring.process_memory import peak_bytes
    from tfdist.pipeline import PipelineModel, deferred_weights
    from tfdist.recompute import recompute

    keras.utils.set_random_seed(0)
    _trim()
    before = psutil.Process().memory_info().rss
    forget_peak()
    is_pipeline = layout.pipeline > 1
    with strategy.scope():
        with deferred_weights() if is_pipeline else contextlib.nullcontext():
            model = model_of(sizes, sequence_parallel=layout.sequence_parallel)
        if layout.recompute != "none":
            recompute(model, layout.recompute)
        if is_pipeline:
            model = PipelineModel(
                model,
                num_microbatches=layout.num_microbatches,
                schedule=layout.schedule,
                chunks=layout.chunks if layout.chunks > 1 else None,
                input_shape=(sizes.length,),
            )
        parts = layout.accumulation
        optimizer = keras.optimizers.Adam(gradient_accumulation_steps=parts if parts > 1 else None)
        model.compile(optimizer, layers.VocabParallelCrossEntropy(sizes.vocabulary))
    random = np.random.default_rng(0)
    rows = global_batch // parts
    tokens, labels = (
        random.integers(0, sizes.vocabulary, (rows, sizes.length), "int32") for _ in range(2)
    )
    data = tf.data.Dataset.from_tensors((tokens, labels)).repeat()
    begins = fit_begins(model, data, (steps + 2) * parts)
    seconds = median_interval(begins[parts::parts])
    peak = peak_bytes() - before
    del model, data
    keras.backend.clear_session(free_memory=True)
    _trim()
    return Measured(seconds, peak, before)


def fit_begins(model: Any, data: Any, steps: int, callbacks: Sequence = ()) -> list[float]:
    """The start time of each step of a `fit` on this rank in seconds, before other callbacks."""
    import keras

    begins: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: begins.append(time.perf_counter())
    )
    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[clock, *callbacks])
    return begins


def median_interval(begins: Sequence[float]) -> float:
    """The median time between steps, without the first."""
    return statistics.median(b - a for a, b in itertools.pairwise(begins[1:]))


def collective_seconds(sizes: list[int], repeats: int = 12) -> list[float]:
    """Median seconds of an all-reduce of each size over all ranks of the pool."""
    from tfdist.testing import engine

    return all_reduce_seconds(engine().group(), sizes, repeats)


def all_reduce_seconds(group: Any, sizes: Sequence[int], repeats: int) -> list[float]:
    """Median seconds of an all-reduce of each size over a group, after two others."""
    import tensorflow as tf

    from tfdist import collectives

    found = []
    for size in sizes:
        own = tf.ones([size // 4])

        @tf.function
        def function(x, size=size):
            name = f"plan/{size}"
            return collectives.all_reduce(x, group, name=name)[0]

        times = []
        for _ in range(repeats + 2):
            begin = time.perf_counter()
            function(own).numpy()
            times.append(time.perf_counter() - begin)
        found.append(statistics.median(times[2:]))
    return found


def moved_bytes_per_second(repeats: int = 20) -> float:
    """The highest rate at which an addition reads and writes an array, in bytes per second."""
    import tensorflow as tf

    array = tf.ones([1 << 21])
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        (array + 1.0).numpy()
        times.append(time.perf_counter() - begin)
    return 2 * 4 * (1 << 21) / min(times)


def forget_peak() -> None:
    """Reset the peak of the process's resident memory to its current size."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _trim() -> None:
    """Return free memory of the C library to the system, so that it does not affect the next model."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
