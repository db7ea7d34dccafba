"""The flight recorder: the collectives that this rank has begun, and those that it has finished.

A collective that hangs reports nothing. Each one therefore counts its begins and ends, inside graphs
with two small variables (a Python callback would cost a hundred times more), and a watchdog thread can
read the counts at any time.

Variables of a graph of TensorFlow 1 belong to the session that runs it, and no other thread can read
them. Collectives in such graphs are counted by callbacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

import tensorflow as tf

from tfdist.backend.clock.stamps import Column, current_stamps
from tfdist.collectives.flight_counts import Counter, Entry, HostCounter
from tfdist.collectives.group import Group

#: The maximum number of reported collectives of a graph in which a thread waits.
_MOST_BLOCKED = 8
#: The maximum number of TensorFlow's exceptions that are examined between two calls of `blocked`; each
#: takes milliseconds.
_MOST_LOOKS = 20


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A collective that has begun and not ended.

    Attributes:
        name: The operation, and the layer or variables that it serves.
        ranks: The ranks of its group.
        occurrence: The number of times that this operation has begun, including this one: the number
            of the step for an operation that runs once per step.
    """

    name: str
    ranks: tuple[int, ...]
    occurrence: int


@dataclasses.dataclass(frozen=True)
class Blocked(InFlight):
    """A collective that a thread cannot leave before other ranks have begun it.

    Attributes:
        needed: The ranks that have to begin it.
    """

    needed: tuple[int, ...]


class Flight:
    """One call of a collective, from begin to end.

    Args:
        recorder: The recorder.
        name: The operation, and what it serves.
        group: Its group.
        lane: The transport that executes it, for measurements of steps (`tfdist.backend.clock.stamps`).
        needed: The ranks that must begin it before it can end here.
        gates: Whether the collective waits for the count of its begin, and its result for that of its end. On
            a GPU each wait is one of the host for all that the GPU has to compute.
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        name: str,
        group: Group,
        lane: str,
        needed: tuple[int, ...],
        gates: bool,
    ):
        self.name, self._gates = name, gates
        self._recorder, self._needed = recorder, needed
        self._entry = recorder._entry(name, group.ranks) if recorder.enabled else None
        self._stamps = current_stamps()
        self._column = Column("call", name, lane, ranks=group.ranks)
        self._ended: Counter | HostCounter | None = None
        self._stamp_end: Callable | None = None

    @contextlib.contextmanager
    def begin(self, tensor: tf.Tensor) -> Iterator[tf.Tensor]:
        """Has operations inside begin after `tensor` is computed and the begin is counted.

        Args:
            tensor: The input of the collective.

        Returns:
            A context, whose value is the tensor.
        """
        entry, recorder = self._entry, self._recorder
        if entry is None:
            with self._stamped(tensor) as stamped:
                yield stamped
            return
        thread = recorder._note_thread()
        if tf.executing_eagerly():
            recorder._inside[thread] = entry, self._needed
            try:
                entry.begun_on_host.add_now()
                with self._stamped(tensor) as stamped:
                    yield stamped
            finally:
                recorder._inside.pop(thread, None)
            return
        entry.needed = self._needed if entry.needed in (None, self._needed) else ()
        begun, self._ended = entry.make_counters()
        with tf.control_dependencies([tensor]):
            began = begun.add_one()
        if not self._gates:
            with self._stamped(tensor) as stamped:
                yield stamped
            return
        with tf.control_dependencies([began]), self._stamped(tf.identity(tensor)) as stamped:
            yield stamped

    @contextlib.contextmanager
    def _stamped(self, tensor: tf.Tensor) -> Iterator[tf.Tensor]:
        if self._stamps is None:
            yield tensor
            return
        begun, self._stamp_end = self._stamps.call(self._column, tensor)
        if not self._gates:
            yield tensor
            return
        with tf.control_dependencies([begun]):
            yield tf.identity(tensor)

    def end(self, result: tf.Tensor | tuple) -> tf.Tensor | tuple:
        """The result of the collective, whose end is counted once it is computed."""
        if self._stamp_end is not None:
            self._stamp_end(tf.nest.flatten(result))
        if self._entry is None:
            return result
        if self._ended is None:
            self._entry.ended_on_host.add_now()
            return result
        with tf.control_dependencies(tf.nest.flatten(result)):
            finished = self._ended.add_one()
        if not self._gates:
            return result
        with tf.control_dependencies([finished]):
            return tf.nest.map_structure(tf.identity, result)


class FlightRecorder:
    """Counts the begins and ends of this rank's collectives."""

    def __init__(self):
        self._entries: dict[tuple, Entry] = {}
        self._lock = threading.Lock()
        #: The threads that have called collectives, and the eager collective in which each is.
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._inside: dict[int, tuple[Entry, tuple[int, ...]]] = {}
        self._has_failed = False
        self._looks = _MOST_LOOKS
        self.enabled = True
        _recorders.add(self)
        _note_errors()

    def flight(
        self,
        name: str,
        group: Group,
        lane: str = "",
        needed: tuple[int, ...] | None = None,
        *,
        gates: bool = True,
    ) -> Flight:
        """A call of a collective that is about to begin.

        Args:
            name: The operation, and what it serves.
            group: Its group.
            lane: The transport that executes it.
            needed: The ranks that must begin it before it can end here; all of the group if None.
            gates: As in `Flight`.
        """
        needed = group.ranks if needed is None else needed
        return Flight(self, name, group, lane, needed, gates)

    def in_flight(self) -> list[InFlight]:
        """The collectives that have begun and not ended."""
        counted = [(entry, *entry.counts()) for entry in self._all()]
        return [
            InFlight(entry.name, entry.ranks, begun)
            for entry, begun, ended in counted
            if begun > ended + entry.abandoned
        ]

    def blocked(
        self, thread: int, flying: Sequence[InFlight], in_graph: Callable[[], bool]
    ) -> list[Blocked]:
        """The collectives that a thread certainly cannot leave before other ranks begin them.

        This is certain for an eager call, and for the collectives under way in a graph that the thread
        runs. It is not if another living thread has called collectives, too, since it may call next the
        one for which the other ranks wait; if a call of the same name failed before, since the ranks may
        then count differently; and if an exception of TensorFlow may have ended the graph.

        Args:
            thread: Its identifier.
            flying: The result of `in_flight`, just now.
            in_graph: Returns whether the thread is in a call of TensorFlow that only waits; called if it
                is not in an eager collective.
        """
        # First, since an exception from here on is handled by the next call.
        failed, self._has_failed, self._looks = self._has_failed, False, _MOST_LOOKS
        entries = self._in_graphs(flying)
        if failed:
            for entry, occurrence in entries:
                entry.suspect = occurrence
        with self._lock:
            threads = list(self._threads)
        if any(other.ident != thread and other.is_alive() for other in threads):
            return []
        running = [entry for entry, occurrence in entries if occurrence > entry.suspect]
        inside = self._inside.get(thread)
        if inside is not None:
            # A graph that runs at the same time belongs to another thread.
            return [] if running else _blocked_in([inside])
        if not running or not in_graph():
            return []
        return _blocked_in([(entry, entry.needed or ()) for entry in running])[:_MOST_BLOCKED]

    def note_error(self) -> None:
        """Notes that collectives under way in graphs may have ended by an exception of TensorFlow."""
        if self._looks <= 0:
            self._has_failed = True
            return
        self._looks -= 1
        for entry, occurrence in self._in_graphs(self.in_flight()):
            entry.suspect = occurrence

    def has_begun(self, name: str, ranks: Sequence[int], occurrence: int) -> bool:
        """Whether this rank has begun a call, or may begin it in a running graph.

        Args:
            name: As in `Blocked`.
            ranks: As in `Blocked`.
            occurrence: As in `Blocked`.
        """
        entry = self._entries.get((name, tuple(ranks)))
        if entry is None:
            return False
        may_begin = entry.is_in_graphs and not self._inside
        return may_begin or entry.counts()[0] >= occurrence

    def abandon(self, calls: Iterable[InFlight]) -> None:
        """Counts calls as ended that began in a graph that has failed, and will never end."""
        for call in calls:
            entry = self._entries[call.name, call.ranks]
            begun, ended = entry.counts()
            if begun == call.occurrence:
                entry.abandoned = begun - ended

    def progress(self) -> int:
        """The number of calls that have ended."""
        return sum(entry.counts()[1] for entry in self._all())

    def _all(self) -> list[Entry]:
        with self._lock:
            return list(self._entries.values())

    def _in_graphs(self, flying: Iterable[InFlight]) -> list[tuple[Entry, int]]:
        """The calls that are in graphs, each with its occurrence."""
        found = [(self._entries[call.name, call.ranks], call.occurrence) for call in flying]
        return [(entry, occurrence) for entry, occurrence in found if entry.is_in_graphs]

    def _note_thread(self) -> int:
        thread = threading.current_thread()
        if thread not in self._threads:
            with self._lock:
                self._threads.add(thread)
        return threading.get_ident()

    def _entry(self, name: str, ranks: tuple[int, ...]) -> Entry:
        with self._lock:
            if (name, ranks) not in self._entries:
                self._entries[name, ranks] = Entry(name, ranks)
            return self._entries[name, ranks]


def _blocked_in(calls: Iterable[tuple[Entry, tuple[int, ...]]]) -> list[Blocked]:
    found = []
    for entry, needed in calls:
        begun, ended = entry.counts()
        if needed and begun == ended + 1 and begun > entry.suspect:
            found.append(Blocked(entry.name, entry.ranks, begun, needed))
    return found


_recorders: weakref.WeakSet[FlightRecorder] = weakref.WeakSet()


@functools.cache
def _note_errors() -> None:
    """Records each exception of TensorFlow, even if it is caught: it may have ended a graph.

    There is no other sign that the collectives under way in that graph will never end.
    """
    original = tf.errors.OpError.__init__

    @functools.wraps(original)
    def note(self, *args, **kwargs):
        original(self, *args, **kwargs)
        # TensorFlow raises many while it builds a graph, and catches them.
        if tf.executing_eagerly() and threading.current_thread() is threading.main_thread():
            for recorder in tuple(_recorders):
                recorder.note_error()

    tf.errors.OpError.__init__ = note
