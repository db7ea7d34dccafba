"""The counts of collectives: variables that graphs increment, and numbers of this process."""

from __future__ import annotations

import threading

import numpy as np
import tensorflow as tf

from tfdist.backend.clock.stamps import Cell


def outermost_is_eager() -> bool:
    """Whether the traced graph will be called eagerly: not inside a `tf.Graph` of TensorFlow 1."""
    with tf.init_scope():
        return tf.executing_eagerly()


class Counter(Cell):
    """A counter that graphs increment and any thread reads.

    Each counter is a separate resource, since TensorFlow would otherwise run the collectives one after
    the other.
    """

    def __init__(self):
        super().__init__(0, dtype=tf.int64)

    def add_one(self) -> tf.Operation:
        """Increments the count when the graph runs."""
        return tf.raw_ops.AssignAddVariableOp(resource=self.handle, value=tf.constant(1, tf.int64))

    def value(self) -> int:
        """The count."""
        return int(self.read())


class HostCounter:
    """A counter in this process: of eager calls, and of graphs that a session runs."""

    def __init__(self):
        self._value = 0
        self._lock = threading.Lock()

    def add_now(self) -> int:
        """Increments the count now; returns the new count."""
        with self._lock:
            self._value += 1
            return self._value

    def add_one(self) -> tf.Tensor:
        """Increments the count when a session runs the graph."""
        with tf.device("/CPU:0"):
            return tf.numpy_function(lambda: np.int64(self.add_now()), [], tf.int64)

    def value(self) -> int:
        """The count."""
        return self._value


class Entry:
    """The counts of one collective."""

    def __init__(self, name: str, ranks: tuple[int, ...]):
        self.name, self.ranks = name, ranks
        self.begun_on_host, self.ended_on_host = HostCounter(), HostCounter()
        self.begun: Counter | None = None
        self.ended: Counter | None = None
        #: The number of calls that began and will not end, since their graph failed.
        self.abandoned = 0
        #: The ranks that must begin it, if it is in a graph; empty if its traces differ.
        self.needed: tuple[int, ...] | None = None
        #: Calls up to this one may have failed with their graph.
        self.suspect = 0

    def make_counters(self) -> tuple[Counter, Counter] | tuple[HostCounter, HostCounter]:
        """The counters of begins and ends for a graph that is traced now."""
        if not outermost_is_eager():
            return self.begun_on_host, self.ended_on_host
        if self.begun is None or self.ended is None:
            self.begun, self.ended = Counter(), Counter()
        return self.begun, self.ended

    @property
    def is_in_graphs(self) -> bool:
        """Whether a graph that is called eagerly contains it."""
        return self.begun is not None

    def counts(self) -> tuple[int, int]:
        """The numbers of begins and ends."""
        # The ends are read first: an operation that ends in the meantime then counts as under way, never
        # as ended before it began.
        ended, begun = self.ended_on_host.value(), self.begun_on_host.value()
        if self.ended is not None and self.begun is not None:
            ended += self.ended.value()
            begun += self.begun.value()
        # On a GPU nothing waits for the counts: a begin may be counted after its end.
        begun = max(begun, ended)
        # A call that has ended after all was not abandoned.
        self.abandoned = min(self.abandoned, max(begun - ended, 0))
        return begun, ended
