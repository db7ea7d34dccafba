"""The cost and benefit of compression: times and bytes, measured in the graph of a step."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfdist.backend.clock.stamps import time_after

_MILLI = 1000.0
#: The number of steps of which medians are computed.
_ROWS = 64


@dataclasses.dataclass(frozen=True)
class CompressionStatistics:
    """Measurements of the training steps on this rank; times are medians.

    Attributes:
        whole_steps: The number of steps without compression, except for the first.
        compressed_steps: The number of steps with compression, except for the first.
        gradient_bytes: The bytes that a rank would send in a step for the compressed gradients.
        payload_bytes: The bytes that it sends for them.
        exposed_whole: Seconds of a step without compression between the last gradient and the last sum:
            the part of the exchange that the backward pass does not hide. NaN if there was no such step.
        exposed: The same of a step with compression, including encoding and decoding.
        exchange: Seconds of the collectives of a step with compression, summed over all buckets.
        coding: Seconds of encoding and decoding, likewise.
        error: The standard error of `saved`, in seconds. NaN with too few steps.
    """

    whole_steps: int
    compressed_steps: int
    gradient_bytes: float
    payload_bytes: float
    exposed_whole: float
    exposed: float
    exchange: float
    coding: float
    error: float = float("nan")

    @property
    def ratio(self) -> float:
        """The compression ratio."""
        return self.gradient_bytes / self.payload_bytes if self.payload_bytes else float("nan")

    @property
    def saved(self) -> float:
        """The seconds by which a step is shorter; negative where it is longer."""
        return self.exposed_whole - self.exposed

    @property
    def pays(self) -> bool:
        """Whether a step is shorter by more than two standard errors."""
        return self.saved > (0 if np.isnan(self.error) else 2 * self.error)

    def __str__(self) -> str:
        if not self.compressed_steps:
            return "Compression: no step was compressed yet."
        text = (
            f"Compression: {_mebibytes(self.gradient_bytes)} of gradients a step as "
            f"{_mebibytes(self.payload_bytes)} ({self.ratio:.1f} to 1); encoding and decoding "
            f"{self.coding * _MILLI:.0f} ms, exchange {self.exchange * _MILLI:.0f} ms, exposed "
            f"{self.exposed * _MILLI:.0f} ms"
        )
        if not self.whole_steps:
            return f"{text}. Without comparison, which requires `start_step` of 2 or more."
        verdict = "pays" if self.pays else "does not pay"
        by_chance = ", which may be chance" if self.saved > 0 and not self.pays else ""
        return (
            f"{text} compared with {self.exposed_whole * _MILLI:.0f} ms whole. It {verdict} on this link: "
            f"a step is {abs(self.saved) * _MILLI:.0f} ms {'shorter' if self.saved > 0 else 'longer'}"
            f"{by_chance}."
        )


class Meter:
    """Stores measurements of the last steps of a training, which their graphs have taken."""

    def __init__(self):
        # A row for each of the last steps: seconds exposed, in buckets, and in exchanges; bytes of
        # gradients, and of payloads. And the number of steps.
        self._rows = [
            tf.Variable(tf.zeros([_ROWS, 5], tf.float64), trainable=False) for _ in range(2)
        ]
        self._steps = [tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(2)]

    @contextlib.contextmanager
    def step(
        self,
        gradients: Sequence[tf.Tensor],
        num_ranks: int,
        *,
        is_compressed: bool,
        begins: bool,
    ) -> Iterator[MeteredStep]:
        """Measures the reduction of some of a step's gradients; `begins` with the first of them."""
        metered = MeteredStep(gradients, num_ranks)
        token = _current.set(metered)
        try:
            yield metered
        finally:
            _current.reset(token)
        rows, steps = self._rows[is_compressed], self._steps[is_compressed]
        if begins:
            steps.assign_add(1)
        place = (steps.read_value() - 1) % _ROWS
        before = tf.zeros([5], tf.float64) if begins else rows.read_value()[place]
        rows.scatter_nd_update([[place]], (before + metered.counts)[None])

    def read(self) -> CompressionStatistics:
        """The medians of the last steps, without the first, which allocates."""
        (whole, whole_steps, whole_error), (compressed, compressed_steps, error) = (
            _median(rows.numpy(), int(steps.numpy()))
            for rows, steps in zip(self._rows, self._steps, strict=True)
        )
        return CompressionStatistics(
            whole_steps=whole_steps,
            compressed_steps=compressed_steps,
            gradient_bytes=float(compressed[3]),
            payload_bytes=float(compressed[4]),
            exposed_whole=float(whole[0]),
            exposed=float(compressed[0]),
            exchange=float(compressed[2]),
            coding=float(compressed[1] - compressed[2]),
            error=float(np.hypot(whole_error, error)),
        )


def _median(rows: np.ndarray, steps: int) -> tuple[np.ndarray, int, float]:
    """The median of each column over the written rows, their number, and the error of the first."""
    rows = rows[1:steps] if steps <= _ROWS else rows
    if not len(rows):
        return np.full(rows.shape[1], np.nan), 0, float("nan")
    # 1.2533 times the standard error of the mean of n normal numbers. By quartiles, for outliers.
    low, high = np.quantile(rows[:, 0], (0.25, 0.75))
    error = 1.2533 * (high - low) / 1.349 / np.sqrt(len(rows)) if len(rows) > 3 else float("nan")
    return np.median(rows, axis=0), steps - 1, error


class MeteredStep:
    """The measurements of one reduction."""

    def __init__(self, gradients: Sequence[tf.Tensor], num_ranks: int):
        self._began = time_after(gradients)
        total = tf.add_n([_bytes_of(gradient) for gradient in gradients])
        self._gradient_bytes = total * sends_of_all_reduce(num_ranks)
        self.buckets: list[tf.Tensor] = []
        self.exchanges: list[tf.Tensor] = []
        self.payloads: list[tf.Tensor] = []

    def end(self, reduced: Sequence[tf.Tensor]) -> None:
        """Records the end of the reduction."""
        exposed = time_after(reduced) - self._began
        zero = tf.constant(0.0, tf.float64)
        sums = [
            tf.add_n(each) if each else zero
            for each in (self.buckets, self.exchanges, [self._gradient_bytes], self.payloads)
        ]
        self.counts = tf.stack([exposed, *sums])

    @contextlib.contextmanager
    def bucket(self, inputs: Sequence[tf.Tensor]) -> Iterator[Callable]:
        """Measures the work for one bucket; the value must be called with its outputs."""
        began = time_after(inputs)
        yield lambda outputs: self.buckets.append(time_after(outputs) - began)


_current: contextvars.ContextVar[MeteredStep | None] = contextvars.ContextVar("step", default=None)


def sends_of_all_reduce(num_ranks: int) -> float:
    """The number of times that each rank sends the bytes of the summed tensors."""
    return 2 * (num_ranks - 1) / num_ranks


def exchange_began(payload: tf.Tensor, sends: float) -> Callable[[tf.Tensor], None]:
    """Records the beginning of a collective.

    Args:
        payload: This rank's input.
        sends: The number of times that it sends the bytes of the input.

    Returns:
        A function to call with the result of the collective.
    """
    metered = _current.get()
    if metered is None:
        return lambda outcome: None
    began = time_after([payload])
    metered.payloads.append(_bytes_of(payload) * sends)
    return lambda outcome: metered.exchanges.append(time_after([outcome]) - began)


def _bytes_of(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.size(tensor), tf.float64) * tensor.dtype.size


def _mebibytes(count: float) -> str:
    return f"{count / (1 << 20):,.2f} MiB"
