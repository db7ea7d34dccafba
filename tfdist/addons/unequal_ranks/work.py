"""How long this rank works in its steps, without what it waits for other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import tensorflow as tf

from tfdist.backend.clock.intervals import common, length, union
from tfdist.backend.clock.rows import Columns, Row, RowBuffer
from tfdist.backend.clock.stamps import Column, Stamps, current_stamps, stamping, time_after
from tfdist.mesh import Mesh


@dataclasses.dataclass(frozen=True)
class Worked:
    """What a rank did from one reduction of gradients to the next.

    Attributes:
        rows: How many samples it computed.
        seconds: How long it took, without what it waited for ranks with other rows.
    """

    rows: float
    seconds: float


class WorkMeter:
    """Stamps the training steps of this rank.

    From the moment a rank has its gradients to the moment it has the next, it waits in two places: for
    the gradients of the others, and in collectives of the forward and backward pass with ranks that
    have other rows. The rest is work, whatever it is: the optimizer, callbacks, input, the model.

    Args:
        mesh: The mesh.
    """

    def __init__(self, mesh: Mesh):
        same_rows = [axis for axis in mesh.shape if axis not in mesh.row_axes]
        #: Ranks that wait for each other while they compute the same rows: that is their work.
        self._peers = frozenset(mesh.group(*same_rows))
        self._buffers: list[RowBuffer] = []
        self._eager_rows: list[Row] = []

    @contextlib.contextmanager
    def measuring(self, rows, arguments) -> Iterator[None]:
        """Inside, a training step is stamped while it is traced or runs eagerly.

        Args:
            rows: How many samples this rank has in it.
            arguments: What the step needs.
        """
        watched = current_stamps()
        # Where somebody watches the step already, the same stamps do.
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
        """Forgets what was not taken."""
        self._eager_rows = []
        for buffer in self._buffers:
            buffer.take()

    def take(self) -> list[Worked]:
        """What was done since the last call, from the first reduction of gradients on."""
        rows = self._eager_rows + [row for buffer in self._buffers for row in buffer.take()]
        rows.sort(key=lambda row: row.first("work"))
        self._eager_rows = []
        found, before, waits, samples = [], math.nan, [], 0.0
        for row in rows:
            begin = row.first("work")
            # What a branch did not reach has the stamp of an earlier step.
            gradients = [stamp for stamp in row.all_of("gradients") if stamp >= begin]
            reduced = [stamp for stamp in row.all_of("reduced") if stamp >= begin]
            samples += row.first("samples")
            waits += self._waits(row, begin)
            waits += zip(gradients, reduced, strict=False)
            if not gradients:
                continue
            now = gradients[0]
            if not math.isnan(before):
                waited = common(union(waits), [(before, now)])
                found.append(Worked(samples, now - before - length(waited)))
            waits = [wait for wait in waits if wait[1] > now]
            before, samples = now, 0.0
        return found

    def _waits(self, row: Row, begin: float) -> list[tuple[float, float]]:
        """The collectives that the step stands still for, with ranks that have other rows."""
        found = []
        for places in row.columns.calls:
            start, end = row.numbers[places.begin], row.numbers[places.end]
            alone = self._peers.issuperset(places.column.ranks)
            if not places.column.in_background and not alone and begin <= start <= end:
                found.append((start, end))
        return found
