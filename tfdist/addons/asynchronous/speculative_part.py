"""A server's part where backups redo the batches of slow workers.

Speculative execution, as in MapReduce (Dean and Ghemawat 2004, section 3.6): an update uses one gradient
of each worker's batch, from the worker or from a backup, whichever comes first. The second one is
dropped. So updates equal those of the workers alone, whichever are slow.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

from tfdist.addons.asynchronous.quorum_part import QuorumPart
from tfdist.addons.asynchronous.server_part import released

#: The weight of the last update in the moving average of slowness.
_NEWEST = 0.25
#: A worker that is slower than this is seldom in time: see `Missing.slowness`.
SELDOM = 1.0


@dataclasses.dataclass(frozen=True)
class Missing:
    """The state of the next update.

    Attributes:
        version: The number of updates made before it.
        missing: [shards]: whether there is no gradient of a worker's batch yet.
        slowness: [shards]: a moving average over updates of how late each worker's gradient was:
            the fraction of the workers that were before it, or 2 if it was not in time.
    """

    version: int
    missing: np.ndarray
    slowness: np.ndarray


class SpeculativePart(QuorumPart):
    """A `QuorumPart` whose update uses one gradient of each of the first workers' batches.

    `_arrived` holds, for each shard, the worker that sent its gradient, counted from 1; 0 for none.
    """

    @property
    def _arrived_shape(self) -> list[int]:
        return [self._hosted.quorum or 0]

    @property
    def _is_backup(self) -> bool:
        return self._hosted.worker >= self._arrived_shape[0]

    def _make_counters(self) -> None:
        super()._make_counters()
        name, shards = self._connection.variable, self._arrived_shape
        self._redone = name(f"{self._prefix}/redone", tf.int64, [self._hosted.num_workers])
        #: The number of workers before each one in the next update; -1 for one that has not arrived.
        self._place = name(f"{self._prefix}/place", tf.int64, shards)
        self._slowness = name(f"{self._prefix}/slowness", tf.float32, shards)
        self._read_redone = self._connection.function([_read(self._redone)], [])
        self._read_missing = self._make_missing()

    def _make_missing(self):
        lock = tf.raw_ops.MutexLock(mutex=self._mutex)
        with tf.control_dependencies([lock]):
            found = [self._total(), _read(self._arrived), _read(self._slowness, tf.float32)]
        end = released(lock, [each.op for each in found])
        return self._connection.function([*found, end], [])

    def _counters(self):
        yield from super()._counters()
        yield self._redone, tf.zeros([self._hosted.num_workers], tf.int64)
        yield self._place, self._nobody()
        yield self._slowness, tf.zeros(self._arrived_shape)

    def redone(self) -> np.ndarray:
        """The number of gradients of each worker's batches that came from a backup."""
        return self._read_redone()[0]

    def missing(self) -> Missing:
        """The state of the next update."""
        version, arrived, slowness = self._read_missing()
        return Missing(int(version), arrived == 0, slowness)

    def _nobody(self) -> tf.Tensor:
        return -tf.ones(self._arrived_shape, tf.int64)

    def _waits(self, then: tf.Tensor) -> tf.Tensor:
        own = tf.reduce_any(tf.equal(_read(self._arrived), self._hosted.worker + 1))
        return super()._waits(then) & own

    def _note(self, before: tf.Tensor, then: tf.Tensor) -> list[tf.Operation]:
        worker = self._hosted.worker
        if self._is_backup:
            return []

        def come() -> tf.Tensor:
            place = _read(self._place)
            value = tf.math.count_nonzero(place >= 0)
            return _after(_set(self._place, tf.constant(worker, tf.int64), value))

        with tf.control_dependencies([before]):
            noted = tf.cond(tf.equal(before, then), come, lambda: tf.zeros([], tf.int64))
        return [noted.op]

    def _counts(self, before: tf.Tensor, then: tf.Tensor, shard: tf.Tensor) -> tf.Tensor:
        is_missing = tf.equal(tf.gather(_read(self._arrived), shard), 0)
        return super()._counts(before, then, shard) & is_missing

    def _arrive(self, shard: tf.Tensor) -> tf.Tensor:
        worker = self._hosted.worker
        ends = [_set(self._arrived, shard, tf.constant(worker + 1, tf.int64))]
        if self._is_backup:
            one = tf.one_hot(shard, self._hosted.num_workers, dtype=tf.int64)
            ends.append(self._add(self._redone, one))
        with tf.control_dependencies(ends):
            return tf.math.count_nonzero(_read(self._arrived))

    def _begin_next(self) -> list[tf.Operation]:
        place = _read(self._place)
        share = tf.cast(place, tf.float32) / self._quorum(tf.float32)
        late = tf.where(place < 0, 2.0, share)
        slowness = _read(self._slowness, tf.float32)
        slowness += _NEWEST * (late - slowness)
        with tf.control_dependencies([slowness]):
            return [
                *super()._begin_next(),
                tf.raw_ops.AssignVariableOp(resource=self._slowness, value=slowness),
                tf.raw_ops.AssignVariableOp(resource=self._place, value=self._nobody()),
            ]


def _read(handle: tf.Tensor, dtype=tf.int64) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def _set(handle: tf.Tensor, place: tf.Tensor, value: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=place, updates=value)


def _after(end: tf.Operation) -> tf.Tensor:
    with tf.control_dependencies([end]):
        return tf.zeros([], tf.int64)
