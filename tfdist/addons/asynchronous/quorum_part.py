"""A server's part where an update uses only the gradients that arrive first.

Chen et al. 2016 (arXiv:1604.00981), "Revisiting distributed synchronous SGD": of N + b workers an update
uses the mean of the first N gradients that were computed from the newest parameters. A later gradient
was computed from old parameters, and is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.addons.asynchronous.server_part import (
    SPARSE,
    ServerPart,
    apply_of,
    gradient_placeholders,
    placeholder,
    released,
)
from tfdist.addons.asynchronous.update_graph import import_update, trace_update


class QuorumPart(ServerPart):
    """A `ServerPart` whose update count is the version of its parameters."""

    def _make_counters(self) -> None:
        hosted, name = self._hosted, self._connection.variable
        self._version = name(f"{self._prefix}/version", tf.int64, [])
        self._arrived = name(f"{self._prefix}/arrived", tf.int64, self._arrived_shape)
        self._dropped = name(f"{self._prefix}/dropped", tf.int64, [hosted.num_workers])
        self._sums = {
            i: name(
                f"{self._prefix}/sum{i}",
                hosted.parameters[i].dtype,
                tuple(hosted.parameters[i].shape),
            )
            for i in self._parameters
        }
        read = tf.raw_ops.ReadVariableOp(resource=self._version, dtype=tf.int64)
        self._read_version = self._connection.function([read], [])
        read = tf.raw_ops.ReadVariableOp(resource=self._dropped, dtype=tf.int64)
        self._read_dropped = self._connection.function([read], [])
        self._withdraw = self._make_withdraw()

    @property
    def _arrived_shape(self) -> list[int]:
        return []

    def _make_withdraw(self):
        then = tf.compat.v1.placeholder(tf.int64, [])
        with tf.control_dependencies([then]):
            lock = tf.raw_ops.MutexLock(mutex=self._mutex)

        def withdraw() -> tf.Tensor:
            ends = [
                self._add(self._count_handle, -self._one()),
                self._add(self._dropped, self._one()),
            ]
            return _after(ends, 1)

        with tf.control_dependencies([lock]):
            waits = self._waits(then)
            end = tf.cond(waits, withdraw, lambda: tf.zeros([], tf.int64))
        return self._connection.function([released(lock, [end.op])], [then])

    def _counters(self):
        yield from super()._counters()
        yield self._version, tf.zeros([], tf.int64)
        yield self._arrived, tf.zeros(self._arrived_shape, tf.int64)
        yield self._dropped, tf.zeros([self._hosted.num_workers], tf.int64)
        for i, handle in self._sums.items():
            yield handle, _zeros(self._hosted.parameters[i])

    def _total(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self._version, dtype=tf.int64)

    def version(self) -> int:
        """The number of updates of the parameters."""
        return int(self._read_version()[0])

    def dropped(self) -> np.ndarray:
        """The number of gradients of each worker that came too late."""
        return self._read_dropped()[0]

    def withdraw(self, then: int) -> None:
        """Counts this worker's last gradient as dropped, if no update has used it.

        It is called at the end of a `fit`, when too few workers are left for an update.

        Args:
            then: The update count when the gradient arrived.
        """
        self._withdraw(np.int64(then))

    def _make_push(self, kinds, given, changed, more):
        hosted = self._hosted
        parameters = [hosted.parameters[i] for i in given]
        sparse = [kinds[i] == SPARSE for i in given]
        traced = None
        if given:
            # The update gets a sum of gradients, which is dense.
            dense = [False] * len(given)
            apply = apply_of(hosted.optimizer)
            traced = trace_update(hosted.optimizer, apply, parameters, dense)
        with self._connection.building():
            rate = tf.compat.v1.placeholder(tf.float32, [])
            then, shard = (tf.compat.v1.placeholder(tf.int64, []) for _ in range(2))
            grads = [gradient_placeholders(v, s) for v, s in zip(parameters, sparse, strict=True)]
            deltas = [placeholder(hosted.variables[i]) for i in changed]
            feeds = [rate, then, shard, *(tensor for each in grads for tensor in each), *deltas]
            # The mutex is acquired once all feeds have arrived.
            with tf.control_dependencies(feeds):
                lock = tf.raw_ops.MutexLock(mutex=self._mutex)
            with tf.control_dependencies([lock]):
                before = self._total()

            def take() -> tf.Tensor:
                ends = [self._add(self._count_handle, self._one())]
                for i, each, is_sparse in zip(given, grads, sparse, strict=True):
                    ends.append(self._add_gradient(i, each, is_sparse))
                for i, delta in zip(changed, deltas, strict=True):
                    ends.append(self._add(self._handles[i], delta / self._quorum(delta.dtype)))
                with tf.control_dependencies(ends):
                    arrived = self._arrive(shard)
                with tf.control_dependencies([arrived]):
                    return tf.cond(arrived < self._quorum(tf.int64), wait, update)

            def wait() -> tf.Tensor:
                return tf.ones([], tf.int64)

            def update() -> tf.Tensor:
                return self._update(given, traced, rate)

            def drop() -> tf.Tensor:
                return _after([self._add(self._dropped, self._one())], 0)

            with tf.control_dependencies([before, *self._note(before, then)]):
                taken = tf.cond(self._counts(before, then, shard), take, drop)
            end = released(lock, [taken.op])
        fetches = [before, end]
        if more is not None:
            fetches += more[0]
            feeds = [*feeds, *more[1]]
        return self._connection.function(fetches, feeds)

    def _first_values(self, rate, then: int, shard: int) -> list:
        return [rate, np.int64(then), np.int64(shard)]

    def _waits(self, then: tf.Tensor) -> tf.Tensor:
        """Whether this worker's last gradient still waits for others to make an update; in the graph."""
        return tf.equal(self._total(), then)

    def _note(self, before: tf.Tensor, then: tf.Tensor) -> list[tf.Operation]:
        """Records a gradient, whether it counts or not; in the graph."""
        del before, then
        return []

    def _counts(self, before: tf.Tensor, then: tf.Tensor, shard: tf.Tensor) -> tf.Tensor:
        """Whether a gradient counts; in the graph."""
        del shard
        return tf.equal(before, then)

    def _arrive(self, shard: tf.Tensor) -> tf.Tensor:
        """Records a gradient that counts, and returns their number; in the graph."""
        del shard
        with tf.control_dependencies([self._add(self._arrived, tf.ones([], tf.int64))]):
            return tf.raw_ops.ReadVariableOp(resource=self._arrived, dtype=tf.int64)

    def _update(self, given: Sequence[int], traced, rate) -> tf.Tensor:
        """Applies the mean of the gradients that arrived, and begins the next version."""
        hosted = self._hosted
        sums = [
            tf.raw_ops.ReadVariableOp(resource=self._sums[i], dtype=hosted.parameters[i].dtype)
            for i in given
        ]
        ends = [*sums, *self._set_rate(rate)]
        with tf.control_dependencies(ends):
            handles = self._handles_of(given)
        if traced is not None:
            ends = import_update(traced, sums, handles, self._connection.device)
        with tf.control_dependencies(ends):
            done = [self._add(self._version, tf.ones([], tf.int64))]
            for i in given:
                zeros = _zeros(hosted.parameters[i])
                done.append(tf.raw_ops.AssignVariableOp(resource=self._sums[i], value=zeros))
            done += self._begin_next()
        return _after(done, 1)

    def _begin_next(self) -> list[tf.Operation]:
        """Resets the gradients that arrived, for the next update; in the graph."""
        zeros = tf.zeros(self._arrived_shape, tf.int64)
        return [tf.raw_ops.AssignVariableOp(resource=self._arrived, value=zeros)]

    def _add_gradient(self, index: int, gradient: Sequence[tf.Tensor], is_sparse: bool):
        share = gradient[0] / self._quorum(gradient[0].dtype)
        if is_sparse:
            return tf.raw_ops.ResourceScatterAdd(
                resource=self._sums[index], indices=gradient[1], updates=share
            )
        return self._add(self._sums[index], share)

    def _add(self, handle: tf.Tensor, value: tf.Tensor) -> tf.Operation:
        return tf.raw_ops.AssignAddVariableOp(resource=handle, value=value)

    def _one(self) -> tf.Tensor:
        return tf.one_hot(self._hosted.worker, self._hosted.num_workers, dtype=tf.int64)

    def _quorum(self, dtype) -> tf.Tensor:
        return tf.cast(self._hosted.quorum, dtype)


def _zeros(variable) -> tf.Tensor:
    return tf.zeros(tuple(variable.shape), variable.dtype)


def _after(ends: Sequence, value: int) -> tf.Tensor:
    """A number that becomes available once some operations have ended."""
    with tf.control_dependencies(list(ends)):
        return tf.identity(tf.constant(value, tf.int64))
