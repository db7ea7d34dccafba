"""The time that this rank works in its steps, without waiting for other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator

import tensorflow as tf

from tfdist.backend.clock.rows import Columns, Row, RowBuffer
from tfdist.backend.clock.stamps import Column, Stamps, current_stamps, stamping, time_after
from tfdist.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class BusyTime:
    """The work of a rank from one reduction of gradients to the next.

    Attributes:
        rows: The number of samples.
        seconds: The time without waiting for ranks with other rows.
    """

    rows: float
    seconds: float


class WorkMeter:
    """Stamps the training steps of this rank.

    Between two times at which a rank has its gradients, it waits in two places: for the gradients of the
    others, and in collectives of the forward and backward pass with ranks that have other rows. The
    rest is work: the optimizer, callbacks, input, and the model.

    Args:
        mesh: The mesh.
    """

    def __init__(self, mesh: Mesh):
        same_rows = [axis for axis in mesh.shape if axis not in mesh.row_axes]
        #: Ranks that compute the same rows: waiting for them counts as work.
        self._peers = frozenset(mesh.group(*same_rows))
        self._buffers: list[RowBuffer] = []
        self._eager_rows: list[Row] = []

    @contextlib.contextmanager
    def measuring(self, rows, arguments) -> Iterator[None]:
        """Stamps a training step in its context, while it is traced or runs eagerly.

        Args:
            rows: The number of samples of this rank in the step.
            arguments: The inputs of the step.
        """
        watched = current_stamps()
        # If the step is stamped already, the same stamps are used.
        stamps = Stamps() if watched is None else watched
        begin = time_after(tf.nest.flatten(arguments, expand_composites=True))
        with stamping(stamps):
            yield
        self._finish(stamps, begin, tf.cast(rows, tf.float64))

    def _finish(self, stamps: Stamps, begin: tf.Tensor, rows: tf.Tensor) -> None:
        noted = stamps.row() if stamps.columns else tf.zeros([0], tf.float64)
        row = tf.concat([tf.stack([begin, rows]), noted], axis=0)
        columns = Columns([Column("work"), Column("samples"), *stamps.columns])
        if tf.executing_eagerly():
            self._eager_rows.append(Row(columns, row.numpy()))
            return
        self._buffers.append(RowBuffer(columns))
        self._buffers[-1].write(row)

    def restart(self) -> None:
        """Discards the stamps that were not taken."""
        self._eager_rows = []
        for buffer in self._buffers:
            buffer.take()

    def take(self) -> list[BusyTime]:
        """The work since the last call, from the first reduction of gradients on."""
        rows = self._eager_rows + [row for buffer in self._buffers for row in buffer.take()]
        rows.sort(key=lambda row: row.first("work"))
        self._eager_rows = []
        found, before, waits, samples = [], math.nan, [], 0.0
        for row in rows:
            begin = row.first("work")
            # A branch that did not run has the stamp of an earlier step.
            gradients = [stamp for stamp in row.all_of("gradients") if stamp >= begin]
            reduced = [stamp for stamp in row.all_of("reduced") if stamp >= begin]
            samples += row.first("samples")
            waits += self._waits(row, begin)
            waits += zip(gradients, reduced, strict=False)
            if not gradients:
                continue
            now = gradients[0]
            if not math.isnan(before):
                found.append(BusyTime(samples, now - before - _covered(waits, before, now)))
            waits = [wait for wait in waits if wait[1] > now]
            before, samples = now, 0.0
        return found

    def _waits(self, row: Row, begin: float) -> list[tuple[float, float]]:
        """The collectives that block the step, with ranks that have other rows."""
        found = []
        for begins_at, ends_at, _ in row.columns.calls:
            column, start, end = (
                row.columns[begins_at],
                row.numbers[begins_at],
                row.numbers[ends_at],
            )
            alone = self._peers.issuperset(column.ranks)
            if not column.in_background and not alone and begin <= start <= end:
                found.append((start, end))
        return found


def _covered(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """The part of a time that is covered by intervals, which may overlap."""
    seconds = 0.0
    for first, last in sorted(intervals):
        first, last = max(first, begin), min(last, end)
        if last > first:
            seconds += last - first
            begin = last
    return seconds
