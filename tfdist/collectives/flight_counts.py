"""The counts of collectives: variables that graphs add to, and numbers of this process."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import tensorflow as tf

_serial_numbers = itertools.count()


def outermost_is_eager() -> bool:
    """Whether what is traced here will be called eagerly: not inside of a `tf.Graph` of TF 1."""
    with tf.init_scope():
        return tf.executing_eagerly()


class Counter:
    """A counter that graphs add to and any thread reads.

    A bare resource, since a `tf.Variable` cannot be made while a `tf.function` is traced. Each
    counter is a resource of its own, or TensorFlow would run the collectives one after the other
    for fear of mixing up their counts.
    """

    def __init__(self):
        with tf.init_scope(), tf.device("/CPU:0"):
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=tf.int64, shape=[], shared_name=f"tfdist-flight-{next(_serial_numbers)}"
            )
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=tf.constant(0, tf.int64))

    def add_one(self) -> tf.Operation:
        """Counts one more, when the graph runs."""
        return tf.raw_ops.AssignAddVariableOp(resource=self._handle, value=tf.constant(1, tf.int64))

    def value(self) -> int:
        """The count."""
        return int(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=tf.int64))


class HostCounter:
    """A counter in this process: of eager calls, and of graphs that a session runs."""

    def __init__(self):
        self._value = 0
        self._lock = threading.Lock()

    def add_now(self) -> int:
        """Counts one more now; returns the new count."""
        with self._lock:
            self._value += 1
            return self._value

    def add_one(self) -> tf.Tensor:
        """Counts one more, when a session runs the graph."""
        with tf.device("/CPU:0"):
            return tf.numpy_function(lambda: np.int64(self.add_now()), [], tf.int64)

    def value(self) -> int:
        """The count."""
        return self._value


class Entry:
    """The counts of one collective."""

    def __init__(self, name: str, group: str, ranks: tuple[int, ...]):
        self.name, self.group, self.ranks = name, group, ranks
        self.begun_on_host, self.ended_on_host = HostCounter(), HostCounter()
        self.begun: Counter | None = None
        self.ended: Counter | None = None
        #: How many calls began and will not end, since the graph that they were in failed.
        self.abandoned = 0
        #: Which ranks have to begin it, of one in a graph; none where its traces differ.
        self.needed: tuple[int, ...] | None = None
        #: Calls up to this one may have failed with their graph.
        self.suspect = 0

    def make_counters(self) -> tuple[Counter, Counter] | tuple[HostCounter, HostCounter]:
        """What a graph that is traced now counts its begins and ends with."""
        if not outermost_is_eager():
            return self.begun_on_host, self.ended_on_host
        if self.begun is None or self.ended is None:
            self.begun, self.ended = Counter(), Counter()
        return self.begun, self.ended

    @property
    def is_in_graphs(self) -> bool:
        """Whether a graph that is called eagerly has it."""
        return self.begun is not None

    def counts(self) -> tuple[int, int]:
        """How often it has begun and ended."""
        # The ends are read first: an operation that ends in between is then seen as under way,
        # never as ended before it began.
        ended, begun = self.ended_on_host.value(), self.begun_on_host.value()
        if self.ended is not None and self.begun is not None:
            ended += self.ended.value()
            begun += self.begun.value()
        # One that did end after all was not abandoned.
        self.abandoned = min(self.abandoned, max(begun - ended, 0))
        return begun, ended
