"""The flight recorder: which collectives this rank has begun and which it has finished.

A collective that hangs says nothing by itself. Each one therefore counts its begins and ends,
inside graphs with two tiny variables of the graph's own (a Python callback would cost a hundred
times more), and a watchdog thread reads the counts whenever it likes.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import tensorflow as tf

__all__ = ["FlightRecorder", "InFlight"]


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A collective that has begun and not ended.

    Attributes:
        name: Operation, and the layer or variables it serves.
        group: The label of its group.
        ranks: The ranks of its group.
        occurrence: How many times this operation has begun, this time included: the n-th step
            for an operation that runs once a step.
    """

    name: str
    group: str
    ranks: tuple[int, ...]
    occurrence: int


class _Entry:
    """The counts of one collective."""

    def __init__(self, name: str, group: str, ranks: tuple[int, ...]):
        self.name, self.group, self.ranks = name, group, ranks
        self.begun_eagerly = self.ended_eagerly = 0
        self.begun: tf.Variable | None = None
        self.ended: tf.Variable | None = None

    def make_variables(self) -> None:
        if self.begun is None:
            # Outside of every graph and strategy: the counts belong to the process.
            with tf.init_scope(), tf.device("/CPU:0"):
                self.begun = tf.Variable(0, dtype=tf.int64, trainable=False, name="begun")
                self.ended = tf.Variable(0, dtype=tf.int64, trainable=False, name="ended")

    def counts(self) -> tuple[int, int]:
        # The ends are read first: an operation that ends in between is then seen as under way,
        # never as ended before it began.
        ended, begun = self.ended_eagerly, self.begun_eagerly
        if self.ended is not None and self.begun is not None:
            ended += int(self.ended.numpy())
            begun += int(self.begun.numpy())
        return begun, ended


class FlightRecorder:
    """Counts the begins and ends of this rank's collectives."""

    def __init__(self):
        self._entries: dict[tuple, _Entry] = {}
        self._lock = threading.Lock()
        self.enabled = True

    def watch(
        self,
        name: str,
        group_label: str,
        ranks: tuple[int, ...],
        tensor: tf.Tensor,
        operation: Callable[[tf.Tensor], tf.Tensor | tuple],
    ) -> tf.Tensor | tuple:
        """Returns `operation(tensor)`, counted as begun once `tensor` is there and as ended after."""
        if not self.enabled:
            return operation(tensor)
        entry = self._entry(name, group_label, ranks)
        if tf.executing_eagerly():
            entry.begun_eagerly += 1
            result = operation(tensor)
            entry.ended_eagerly += 1
            return result
        entry.make_variables()
        with tf.control_dependencies([tensor]):
            begun = entry.begun.assign_add(1, read_value=False)
        with tf.control_dependencies([begun]):
            result = operation(tf.identity(tensor))
        flat = tf.nest.flatten(result)
        with tf.control_dependencies(flat):
            ended = entry.ended.assign_add(1, read_value=False)
        with tf.control_dependencies([ended]):
            return tf.nest.map_structure(tf.identity, result)

    def in_flight(self) -> list[InFlight]:
        """The collectives that have begun and not ended."""
        with self._lock:
            entries = list(self._entries.values())
        found = []
        for entry in entries:
            begun, ended = entry.counts()
            if begun > ended:
                found.append(InFlight(entry.name, entry.group, entry.ranks, begun))
        return found

    def progress(self) -> int:
        """A number that grows with each collective that ends."""
        with self._lock:
            entries = list(self._entries.values())
        return sum(entry.counts()[1] for entry in entries)

    def _entry(self, name: str, group_label: str, ranks: tuple[int, ...]) -> _Entry:
        key = (name, ranks)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = _Entry(name, group_label, ranks)
            return self._entries[key]


