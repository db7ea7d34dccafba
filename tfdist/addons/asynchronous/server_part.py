"""One server's part of a model: how its variables are filled, read and updated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist.addons.asynchronous.connection import ServerConnection
from tfdist.addons.asynchronous.update_graph import import_update, trace_update

#: How a parameter's gradient is sent.
NONE, DENSE, SPARSE = "none", "dense", "sparse"

#: A gRPC message holds at most 2 GiB.
_MOST_BYTES = (1 << 31) - (1 << 20)


@dataclasses.dataclass(frozen=True)
class ModelVariables:
    """The variables of a model that are stored on servers.

    Attributes:
        optimizer: Its optimizer.
        parameters: The variables that the optimizer updates.
        states: The other variables that training changes.
        worker: The index of this worker.
        num_workers: The number of workers.
        delay_compensation: lambda of DC-ASGD; 0 for none.
        quorum: The number of gradients of an update; None where each gradient makes an update.
    """

    optimizer: keras.optimizers.Optimizer
    parameters: Sequence[keras.Variable]
    states: Sequence[keras.Variable]
    worker: int
    num_workers: int
    delay_compensation: float
    quorum: int | None = None

    @property
    def variables(self) -> list[keras.Variable]:
        """All variables without the optimizer's: parameters, then states."""
        return [*self.parameters, *self.states]


class ServerPart:
    """One server's part of a model.

    Args:
        hosted: The model's variables.
        connection: The connection to the server.
        number: The index of the model in the strategy.
        indices: The places of the variables that are on this server.
    """

    def __init__(
        self, hosted: ModelVariables, connection: ServerConnection, number: int, indices: list[int]
    ):
        self._hosted, self._connection, self.indices = hosted, connection, indices
        self.number = connection.index
        self._prefix = f"model{number}"
        variables = hosted.variables
        total = sum(bytes_of(variables[index]) for index in indices)
        if total > _MOST_BYTES:
            raise ValueError(
                "The variables on one server must be smaller than 2 GiB. Received: a model of which "
                f"server {self.number} would hold {total:,} bytes. Use more servers: `servers=` of the "
                "strategy, or `tfdist-run --ps=`."
            )
        self._parameters = [i for i in indices if i < len(hosted.parameters)]
        optimizer = hosted.optimizer
        self._rate_place = _rate_place(optimizer)
        self._optimizer_places: tuple[int, ...] = ()
        if self._parameters:
            own = [hosted.parameters[i] for i in self._parameters]
            dense = [False] * len(own)
            self._optimizer_places = trace_update(
                optimizer, apply_of(optimizer), own, dense
            ).variables
        with connection.building():
            self._handles = {i: self._variable(f"variable{i}", variables[i]) for i in indices}
            self._optimizer_handles = {
                place: self._variable(f"optimizer{place}", optimizer.variables[place])
                for place in self._optimizer_places
            }
            self._count_handle = connection.variable(
                f"{self._prefix}/updates", tf.int64, [hosted.num_workers]
            )
            self._mutex = tf.raw_ops.MutexV2(
                container="", shared_name=f"tfdist/{self._prefix}/mutex"
            )
            self._then = {}
            if hosted.delay_compensation:
                self._then = {
                    i: connection.variable(
                        f"{self._prefix}/then{hosted.worker}/{i}",
                        variables[i].dtype,
                        tuple(variables[i].shape),
                    )
                    for i in self._parameters
                }
            self._make_counters()
        self._pulls: dict = {}
        self._pushes: dict = {}
        self._rows: dict = {}
        self._publish = self._make_publish()
        self._pull_optimizer = self._make_pull_optimizer()
        self._count = self._make_count()

    def _variable(self, name: str, variable: keras.Variable) -> tf.Tensor:
        return self._connection.variable(
            f"{self._prefix}/{name}", variable.dtype, tuple(variable.shape)
        )

    def _make_counters(self) -> None:
        """Makes the additional counters of the server; in the graph under construction."""

    def _counters(self) -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
        """The variables that begin at zero, with the zeros."""
        yield self._count_handle, tf.zeros([self._hosted.num_workers], tf.int64)

    # -- publish and read -------------------------------------------------------------------

    def _all(self) -> list[tuple[tf.Tensor, keras.Variable]]:
        variables, state = self._hosted.variables, self._hosted.optimizer.variables
        found = [(handle, variables[i]) for i, handle in self._handles.items()]
        return found + [(handle, state[i]) for i, handle in self._optimizer_handles.items()]

    def _make_publish(self):
        with self._connection.building():
            feeds, ends = [], []
            lock = tf.raw_ops.MutexLock(mutex=self._mutex)
            with tf.control_dependencies([lock]):
                for handle, variable in self._all():
                    feeds.append(placeholder(variable))
                    ends.append(tf.raw_ops.AssignVariableOp(resource=handle, value=feeds[-1]))
                for handle, zeros in self._counters():
                    ends.append(tf.raw_ops.AssignVariableOp(resource=handle, value=zeros))
            end = released(lock, ends)
        return self._connection.function([end], feeds)

    def publish(self) -> None:
        """Sets the server's variables to this worker's values, and its update count to zero."""
        self._publish(*[variable.numpy() for _, variable in self._all()])

    def pull(self, indices: Sequence[int]) -> tuple[dict[int, np.ndarray], int]:
        """The values of variables at one moment, and the update count at that moment."""
        own = tuple(i for i in indices if i in self._handles)
        if own not in self._pulls:
            self._pulls[own] = self._make_pull(own)
        *values, count = self._pulls[own]()
        return dict(zip(own, values, strict=True)), int(count)

    def _make_pull(self, own: Sequence[int]):
        variables = self._hosted.variables
        with self._connection.building():
            lock = tf.raw_ops.MutexLock(mutex=self._mutex)
            with tf.control_dependencies([lock]):
                values = [
                    tf.raw_ops.ReadVariableOp(resource=self._handles[i], dtype=variables[i].dtype)
                    for i in own
                ]
                count = self._total()
                ends = [count.op, *(value.op for value in values)]
                for i, value in zip(own, values, strict=True):
                    if i in self._then:
                        ends.append(
                            tf.raw_ops.AssignVariableOp(resource=self._then[i], value=value)
                        )
            end = released(lock, ends)
        return self._connection.function([*values, count, end], [])

    def _total(self) -> tf.Tensor:
        return tf.reduce_sum(tf.raw_ops.ReadVariableOp(resource=self._count_handle, dtype=tf.int64))

    def _make_pull_optimizer(self):
        state = self._hosted.optimizer.variables
        with self._connection.building():
            lock = tf.raw_ops.MutexLock(mutex=self._mutex)
            with tf.control_dependencies([lock]):
                values = [
                    tf.raw_ops.ReadVariableOp(resource=handle, dtype=state[place].dtype)
                    for place, handle in self._optimizer_handles.items()
                ]
            end = released(lock, [value.op for value in values])
        return self._connection.function([*values, end], [])

    def pull_optimizer(self) -> dict[int, np.ndarray]:
        """The values of the optimizer's variables on this server."""
        return dict(zip(self._optimizer_handles, self._pull_optimizer(), strict=True))

    def pull_rows(self, index: int, ids: np.ndarray) -> np.ndarray:
        """Rows of a parameter."""
        if index not in self._rows:
            with self._connection.building():
                feed = tf.compat.v1.placeholder(tf.int64, [None])
                rows = tf.raw_ops.ResourceGather(
                    resource=self._handles[index],
                    indices=feed,
                    dtype=self._hosted.variables[index].dtype,
                )
                fetches = [rows]
                if index in self._then:
                    fetches.append(
                        tf.raw_ops.ResourceScatterUpdate(
                            resource=self._then[index], indices=feed, updates=rows
                        )
                    )
            self._rows[index] = self._connection.function(fetches, [feed])
        return self._rows[index](ids)[0]

    def _make_count(self):
        with self._connection.building():
            read = tf.raw_ops.ReadVariableOp(resource=self._count_handle, dtype=tf.int64)
        return self._connection.function([read], [])

    def count(self) -> np.ndarray:
        """The number of updates of each worker that were applied."""
        return self._count()[0]

    def version(self) -> int:
        """See `QuorumPart`; here each gradient makes an update."""
        return int(self.count().sum())

    def dropped(self) -> np.ndarray:
        """The number of gradients of each worker that came too late, which is 0."""
        return np.zeros([self._hosted.num_workers], np.int64)

    def redone(self) -> np.ndarray:
        """The number of gradients of each worker's batches from a backup, which is 0."""
        return np.zeros([self._hosted.num_workers], np.int64)

    # -- update -----------------------------------------------------------------------------

    def push(self, kinds, grads, deltas, rate, more, then: int, shard: int) -> tuple[int, list]:
        """See `HostedModel.push`; `then` is the update count of this server."""
        given = [i for i in self._parameters if kinds[i] != NONE]
        changed = tuple(i for i in self.indices if i in deltas)
        key = (tuple(kinds[i] for i in given), tuple(given), changed, more is not None)
        if key not in self._pushes:
            self._pushes[key] = self._make_push(kinds, given, changed, more)
        values = [
            *self._first_values(rate, then, shard),
            *(each for i in given for each in grads[i]),
        ]
        values += [deltas[i] for i in changed]
        values += more[2] if more is not None else []
        before, *fetched = self._pushes[key](*values)
        return int(before), fetched

    def _first_values(self, rate, then: int, shard: int) -> list:
        """The values that a push feeds before the gradients."""
        del then, shard
        return [rate]

    def _make_push(self, kinds, given, changed, more):
        hosted = self._hosted
        optimizer = hosted.optimizer
        parameters = [hosted.parameters[i] for i in given]
        sparse = [kinds[i] == SPARSE for i in given]
        traced = trace_update(optimizer, apply_of(optimizer), parameters, sparse) if given else None
        with self._connection.building():
            rate = tf.compat.v1.placeholder(tf.float32, [])
            grads = [gradient_placeholders(v, s) for v, s in zip(parameters, sparse, strict=True)]
            deltas = [placeholder(hosted.variables[i]) for i in changed]
            feeds = [rate, *(tensor for each in grads for tensor in each), *deltas]
            # The mutex is acquired once all feeds have arrived.
            with tf.control_dependencies(feeds):
                lock = tf.raw_ops.MutexLock(mutex=self._mutex)
            with tf.control_dependencies([lock]):
                before = self._total()
            with tf.control_dependencies([lock, before]):
                ends = [before.op, *self._set_rate(rate)]
                for i, delta in zip(changed, deltas, strict=True):
                    ends.append(
                        tf.raw_ops.AssignAddVariableOp(resource=self._handles[i], value=delta)
                    )
                sent = [
                    tensor
                    for i, each, is_sparse in zip(given, grads, sparse, strict=True)
                    for tensor in self._compensated(i, each, is_sparse)
                ]
            with tf.control_dependencies([*ends, *sent]):
                handles = self._handles_of(given)
            if traced is not None:
                ends += import_update(traced, sent, handles, self._connection.device)
            with tf.control_dependencies(ends):
                one = tf.one_hot(hosted.worker, hosted.num_workers, dtype=tf.int64)
                counted = tf.raw_ops.AssignAddVariableOp(resource=self._count_handle, value=one)
            end = released(lock, [counted])
        fetches = [before, end]
        if more is not None:
            fetches += more[0]
            feeds = [*feeds, *more[1]]
        return self._connection.function(fetches, feeds)

    def _set_rate(self, rate: tf.Tensor) -> list[tf.Operation]:
        """Sets the optimizer's learning rate, if it is on this server; in the graph."""
        if self._rate_place not in self._optimizer_handles:
            return []
        dtype = self._hosted.optimizer.variables[self._rate_place].dtype
        handle = self._optimizer_handles[self._rate_place]
        return [tf.raw_ops.AssignVariableOp(resource=handle, value=tf.cast(rate, dtype))]

    def _handles_of(self, given: Sequence[int]) -> dict[int, tf.Tensor]:
        """The handles for an imported update of some parameters, by the `id` of the worker's handles.

        They are copied by `tf.identity`: the update waits for earlier operations only through its inputs.
        """
        hosted = self._hosted
        own = [(hosted.parameters[i], self._handles[i]) for i in given]
        own += [
            (hosted.optimizer.variables[place], handle)
            for place, handle in self._optimizer_handles.items()
        ]
        return {id(variable.value.handle): tf.identity(handle) for variable, handle in own}

    def _compensated(self, index: int, gradient: Sequence[tf.Tensor], is_sparse: bool):
        """DC-ASGD (arXiv:1609.08326): g + lambda g g (w_now - w_then)."""
        amount = self._hosted.delay_compensation
        if not amount:
            return gradient
        value = gradient[0]
        variable = self._hosted.parameters[index]
        now, then = self._handles[index], self._then[index]
        if is_sparse:
            now, then = (
                tf.raw_ops.ResourceGather(resource=each, indices=gradient[1], dtype=variable.dtype)
                for each in (now, then)
            )
        else:
            now, then = (
                tf.raw_ops.ReadVariableOp(resource=each, dtype=variable.dtype)
                for each in (now, then)
            )
        return [value + amount * value * value * (now - then), *gradient[1:]]


def apply_of(optimizer: keras.optimizers.Optimizer) -> Callable:
    """The `apply` of the optimizer's class, even while it is overridden."""
    return type(optimizer).apply.__get__(optimizer)


def _rate_place(optimizer) -> int | None:
    """The place of the learning rate among the optimizer's variables; None for a schedule."""
    rate = optimizer.learning_rate
    for place, variable in enumerate(optimizer.variables):
        if variable is rate:
            return place
    return None


def released(lock: tf.Tensor, ends: Sequence) -> tf.Operation:
    """Releases a mutex after some operations."""
    with tf.control_dependencies(list(ends)):
        return tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)


def placeholder(variable: keras.Variable) -> tf.Tensor:
    """A placeholder for the value of a variable, in the graph under construction."""
    return tf.compat.v1.placeholder(variable.dtype, tuple(variable.shape))


def gradient_placeholders(variable: keras.Variable, is_sparse: bool) -> list[tf.Tensor]:
    """Placeholders for the gradient of a variable: a tensor, or rows and their indices."""
    if not is_sparse:
        return [placeholder(variable)]
    shape = [None, *tuple(variable.shape)[1:]]
    return [
        tf.compat.v1.placeholder(variable.dtype, shape),
        tf.compat.v1.placeholder(tf.int64, [None]),
    ]


def bytes_of(variable: keras.Variable) -> int:
    """The size of a variable in bytes."""
    return int(np.prod(variable.shape, dtype=np.int64)) * tf.as_dtype(variable.dtype).size
