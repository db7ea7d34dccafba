"""Times of a rank alone: training steps of GPT-2 small, and attention."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

#: GPT-2 small, and what a rehearsal takes.
_FULL = {
    "layers": 12,
    "width": 768,
    "heads": 12,
    "vocabulary": 50_257,
    "length": 1024,
    "rows": 8,
    "steps": 30,
}
_SMALL = {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "vocabulary": 101,
    "length": 32,
    "rows": 2,
    "steps": 6,
}
_WARM_UP = 4


def step(
    rehearse: bool,
    model: str,
    strategy: str | None = None,
    axes: dict[str, int] | None = None,
    jit: bool | str = "auto",
    gates: bool = False,
    bucket_mib: int | None = None,
    monitor: bool = False,
) -> dict[str, Any]:
    """The time of a training step of GPT-2 small in mixed_bfloat16 with AdamW.

    Args:
        rehearse: Whether sizes are small.
        model: "tfdist" or "hub".
        strategy: "local", "loopback", or None for plain Keras.
        axes: The mesh of the loopback.
        jit: `jit_compile` of `compile`.
        gates: Whether collectives wait for the counts of the flight recorder.
        bucket_mib: The size of a bucket; None for the default.
        monitor: Whether a Monitor measures the steps.
    """
    sizes = _SMALL if rehearse else _FULL
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.set_random_seed(0)
    made = _strategy(strategy, axes or {}, bucket_mib)
    if gates:
        _gate_all()
    with contextlib.nullcontext() if made is None else made.scope():
        network = _gpt(sizes) if model == "tfdist" else _hub(sizes)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile(keras.optimizers.AdamW(1e-4), loss, jit_compile=jit)
    draw = np.random.default_rng(0)
    x = draw.integers(0, sizes["vocabulary"], (sizes["rows"], sizes["length"])).astype("int32")
    ends = _Ends()
    callbacks = [ends]
    if monitor:
        from tfdist.callbacks import Monitor

        callbacks.append(Monitor(sizes["rows"], show=False))
    began = time.perf_counter()
    network.fit(
        _batches(x), steps_per_epoch=sizes["steps"], epochs=1, verbose=0, callbacks=callbacks
    )
    taken = np.diff(ends.seconds)[_WARM_UP:]
    return {
        "ms": 1e3 * float(np.median(taken)),
        "least": 1e3 * float(taken.min()),
        "first_s": ends.seconds[0] - began,
        **_peak(),
        "loss": ends.loss,
    }


class _Ends(keras.callbacks.Callback):
    """When steps end; their loss is read, so that they have ended on the GPU too."""

    def __init__(self):
        super().__init__()
        self.seconds: list[float] = []
        self.loss = 0.0

    def on_train_batch_end(self, batch, logs=None):
        """Reads the loss."""
        self.loss = float((logs or {})["loss"])
        self.seconds.append(time.perf_counter())


def _strategy(kind: str | None, axes: dict[str, int], bucket_mib: int | None):
    if kind is None:
        return None
    from tfdist import strategies

    options: dict[str, Any] = {} if bucket_mib is None else {"bucket_mib": bucket_mib}
    if kind == "local":
        return strategies.LocalStrategy(**options)
    from benchmarks.gpu.loopback import loopback
    from tfdist.strategies.devices import pin_gpu

    pin_gpu()
    return strategies.HorovodStrategy(engine=loopback(**axes), watchdog_seconds=0, **options)


def _gate_all() -> None:
    """Has all collectives wait for their counts, as on CPUs."""
    from tfdist.collectives.flight_recorder import FlightRecorder

    original: Callable = FlightRecorder.flight

    def gated(self, *arguments, gates=True):
        return original(self, *arguments, gates=True)

    FlightRecorder.flight = gated  # type: ignore[method-assign]


def _gpt(sizes: dict[str, int]) -> keras.Model:
    from tfdist.models import gpt

    return gpt(
        sizes["vocabulary"], num_layers=sizes["layers"], width=sizes["width"], num_heads=sizes["heads"],
        max_length=sizes["length"],
    )  # fmt: skip


def _hub(sizes: dict[str, int]) -> keras.Model:
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        sizes["vocabulary"], sizes["layers"], sizes["heads"], sizes["width"], 4 * sizes["width"],
        dropout=0.0, max_sequence_length=sizes["length"],
    )  # fmt: skip
    ids = keras.Input((sizes["length"],), dtype="int32")
    hidden = backbone({"token_ids": ids, "padding_mask": keras.ops.ones_like(ids)})
    return keras.Model(ids, backbone.token_embedding(hidden, reverse=True))


def _batches(x):
    """The same batch again and again."""
    y = np.roll(x, -1, 1)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.data.Dataset.from_tensors((x, y)).repeat()
    return iter(lambda: (x, y), None)


def _peak() -> dict[str, float]:
    if keras.backend.backend() != "tensorflow":
        return {}
    import tensorflow as tf

    if not tf.config.list_logical_devices("GPU"):
        return {}
    peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
    return {"peak_gib": peak / (1 << 30)}


def attention(rehearse: bool) -> dict[str, Any]:
    """The times of a forward and a backward pass of causal attention, by length and form, in ms."""
    import tensorflow as tf

    from tfdist.context_parallel.blockwise import blockwise_attention

    def whole(query, key, value):
        scores = tf.matmul(query, key, transpose_b=True) * query.shape[-1] ** -0.5
        seen = tf.linalg.band_part(tf.ones(scores.shape[-2:], tf.bool), -1, 0)
        scores = tf.where(seen, tf.cast(scores, tf.float32), -1e9)
        return tf.matmul(tf.cast(tf.nn.softmax(scores), value.dtype), value)

    def blocks(size: int) -> Callable:
        return lambda q, k, v: blockwise_attention(q, k, v, causal=True, block_size=size)

    forms = {
        "blocks-256": (blocks(256), False),
        "blocks-1024": (blocks(1024), False),
        "whole": (whole, False),
        "whole-xla": (whole, True),
    }
    found: dict[str, Any] = {}
    for length, rows in ((64, 1), (128, 1)) if rehearse else ((1024, 8), (4096, 2)):
        draw = np.random.default_rng(0).normal(size=(3, rows, 12, length, 64))
        parts = tf.unstack(tf.constant(draw, tf.bfloat16))
        for name, (form, jit) in forms.items():
            found[f"{name}/{length}"] = _milliseconds(form, parts, jit, 2 if rehearse else 20)
    return found


def _milliseconds(form: Callable, parts: list, jit: bool, times: int) -> float:
    import tensorflow as tf

    @tf.function(jit_compile=jit)
    def both(*parts):
        with tf.GradientTape() as tape:
            tape.watch(parts)
            out = form(*parts)
        return tape.gradient(out, parts)

    def run() -> float:
        began = time.perf_counter()
        for _ in range(times):
            made = both(*parts)
        made[0].numpy()
        return (time.perf_counter() - began) / times

    run()
    return 1e3 * statistics.median(run() for _ in range(3))
