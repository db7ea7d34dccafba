"""The flight recorder: which collectives this rank has begun and which it has finished.

A collective that hangs says nothing by itself. Each one therefore counts its begins and ends,
inside graphs with two tiny variables of the graph's own (a Python callback would cost a hundred
times more), and a watchdog thread reads the counts whenever it likes.

Variables of a graph in the manner of TensorFlow 1 belong to the session that runs it, and no other
thread can read them. Collectives of such graphs are counted by callbacks after all.
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

#: Of the collectives of a graph that a thread waits in, so many are told.
_MOST_BLOCKED = 8
#: So many exceptions of TensorFlow are looked into between two calls of `blocked`; it takes milliseconds.
_MOST_LOOKS = 20


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


@dataclasses.dataclass(frozen=True)
class Blocked:
    """A collective that a thread cannot leave before other ranks have begun it.

    Attributes:
        name: As in `InFlight`.
        ranks: As in `InFlight`.
        needed: Those of the ranks that have to begin it.
        occurrence: As in `InFlight`.
    """

    name: str
    ranks: tuple[int, ...]
    needed: tuple[int, ...]
    occurrence: int


class Flight:
    """One call of a collective, from begin to end.

    Args:
        recorder: The recorder.
        name: Operation, and what it serves.
        group: Its group.
        lane: The transport that carries it, for those who time steps (`tfdist.backend.clock.stamps`).
        needed: The ranks that must begin it before it can end here.
    """

    def __init__(
        self, recorder: FlightRecorder, name: str, group: Group, lane: str, needed: tuple[int, ...]
    ):
        self.name = name
        self._recorder, self._needed = recorder, needed
        self._entry = recorder._entry(name, group.label, group.ranks) if recorder.enabled else None
        self._stamps = current_stamps()
        self._column = Column("call", name, lane, ranks=group.ranks)
        self._ended: Counter | HostCounter | None = None
        self._stamp_end: Callable | None = None

    @contextlib.contextmanager
    def begin(self, tensor: tf.Tensor) -> Iterator[tf.Tensor]:
        """Inside, operations begin once `tensor` is there and the begin is counted.

        Args:
            tensor: What the collective begins with.

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
        with tf.control_dependencies([began]), self._stamped(tf.identity(tensor)) as stamped:
            yield stamped

    @contextlib.contextmanager
    def _stamped(self, tensor: tf.Tensor) -> Iterator[tf.Tensor]:
        if self._stamps is None:
            yield tensor
            return
        begun, self._stamp_end = self._stamps.call(self._column, tensor)
        with tf.control_dependencies([begun]):
            yield tf.identity(tensor)

    def end(self, result: tf.Tensor | tuple) -> tf.Tensor | tuple:
        """The result of the collective, whose end is counted once it is there."""
        if self._stamp_end is not None:
            self._stamp_end(tf.nest.flatten(result))
        if self._entry is None:
            return result
        if self._ended is None:
            self._entry.ended_on_host.add_now()
            return result
        with tf.control_dependencies(tf.nest.flatten(result)):
            finished = self._ended.add_one()
        with tf.control_dependencies([finished]):
            return tf.nest.map_structure(tf.identity, result)


class FlightRecorder:
    """Counts the begins and ends of this rank's collectives."""

    def __init__(self):
        self._entries: dict[tuple, Entry] = {}
        self._lock = threading.Lock()
        #: The threads that have called collectives, and what each is inside of eagerly.
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._inside: dict[int, tuple[Entry, tuple[int, ...]]] = {}
        self._has_failed = False
        self._looks = _MOST_LOOKS
        self.enabled = True
        _recorders.add(self)
        _note_errors()

    def flight(
        self, name: str, group: Group, lane: str = "", needed: tuple[int, ...] | None = None
    ) -> Flight:
        """A call of a collective that is about to begin.

        Args:
            name: Operation, and what it serves.
            group: Its group.
            lane: The transport that carries it.
            needed: The ranks that must begin it before it can end here; all of the group if None.
        """
        return Flight(self, name, group, lane, group.ranks if needed is None else needed)

    def in_flight(self) -> list[InFlight]:
        """The collectives that have begun and not ended."""
        with self._lock:
            entries = list(self._entries.values())
        found = []
        for entry in entries:
            begun, ended = entry.counts()
            if begun > ended + entry.abandoned:
                found.append(InFlight(entry.name, entry.group, entry.ranks, begun))
        return found

    def blocked(
        self, thread: int, flying: Sequence[InFlight], in_graph: Callable[[], bool]
    ) -> list[Blocked]:
        """What a thread cannot leave before other ranks come; nothing where that is not certain.

        It is certain of an eager call, and of what is under way in a graph that the thread runs. It is
        not where another living thread has called collectives, too, since that one may do next what
        the other ranks wait for; where a call of the same name failed before, since the ranks may then
        count differently; and where an exception of TensorFlow may have ended the graph.

        Args:
            thread: Its identifier.
            flying: What `in_flight` has returned just now.
            in_graph: Returns whether it is in a call of TensorFlow that does nothing but wait; asked if it
                is in no eager collective.
        """
        # First, since an exception from here on is seen by the next call.
        failed, self._has_failed, self._looks = self._has_failed, False, _MOST_LOOKS
        with self._lock:
            entries = [self._entries[call.name, call.ranks] for call in flying]
            threads = list(self._threads)
        in_graphs = [
            (entry, call.occurrence)
            for entry, call in zip(entries, flying, strict=True)
            if entry.is_in_graphs
        ]
        if failed:
            for entry, occurrence in in_graphs:
                entry.suspect = occurrence
        if any(other.ident != thread and other.is_alive() for other in threads):
            return []
        running = [entry for entry, occurrence in in_graphs if occurrence > entry.suspect]
        inside = self._inside.get(thread)
        if inside is not None:
            # A graph that runs meanwhile is another thread's.
            return [] if running else _blocked_in([inside])
        if not running or not in_graph():
            return []
        return _blocked_in([(entry, entry.needed or ()) for entry in running])[:_MOST_BLOCKED]

    def note_error(self) -> None:
        """What is under way in graphs may have ended by an exception of TensorFlow."""
        if self._looks <= 0:
            self._has_failed = True
            return
        self._looks -= 1
        for call in self.in_flight():
            with self._lock:
                entry = self._entries[call.name, call.ranks]
            if entry.is_in_graphs:
                entry.suspect = call.occurrence

    def has_begun(self, name: str, ranks: Sequence[int], occurrence: int) -> bool:
        """Whether this rank has begun a call, or may do so in a graph that is under way.

        Args:
            name: As in `Blocked`.
            ranks: As in `Blocked`.
            occurrence: As in `Blocked`.
        """
        with self._lock:
            entry = self._entries.get((name, tuple(ranks)))
        if entry is None:
            return False
        if entry.is_in_graphs and not self._inside:
            return True
        return entry.counts()[0] >= occurrence

    def abandon(self, calls: Iterable[InFlight]) -> None:
        """Takes calls for over that began in a graph that has failed, and will never end."""
        for call in calls:
            with self._lock:
                entry = self._entries[call.name, call.ranks]
            begun, ended = entry.counts()
            if begun == call.occurrence:
                entry.abandoned = begun - ended

    def names(self) -> list[str]:
        """The collectives that this rank has come by, in graphs and eagerly, each once."""
        with self._lock:
            return [entry.name for entry in self._entries.values()]

    def progress(self) -> int:
        """A number that grows with each collective that ends."""
        with self._lock:
            entries = list(self._entries.values())
        return sum(entry.counts()[1] for entry in entries)

    def _note_thread(self) -> int:
        thread = threading.current_thread()
        if thread not in self._threads:
            with self._lock:
                self._threads.add(thread)
        return threading.get_ident()

    def _entry(self, name: str, group_label: str, ranks: tuple[int, ...]) -> Entry:
        key = (name, ranks)
        with self._lock:
            if key not in self._entries:
                self._entries[key] = Entry(name, group_label, ranks)
            return self._entries[key]


def _blocked_in(calls: Iterable[tuple[Entry, tuple[int, ...]]]) -> list[Blocked]:
    found = []
    for entry, needed in calls:
        begun, ended = entry.counts()
        if needed and begun == ended + 1 and begun > entry.suspect:
            found.append(Blocked(entry.name, entry.ranks, needed, begun))
    return found


_recorders: weakref.WeakSet[FlightRecorder] = weakref.WeakSet()


@functools.cache
def _note_errors() -> None:
    """Has each exception of TensorFlow noted, whoever catches it: a graph may have ended by it.

    Nothing else tells that the collectives which were under way there will never end.
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
